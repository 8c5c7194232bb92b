"""Puts in training mode, while a model is traced, the modules that may drop and no others."""

from __future__ import annotations

from torch import nn

from momentprop.capture.replica import replica

# Layers of torch.nn whose dropout depends on their training flag. Its other layers stay in eval mode, as
# does every layer that holds running statistics; layers written by users are armed, since any may call
# F.dropout(x, p, self.training). Transformers drop nothing by themselves, but in eval mode they take a fused
# path that knows no dropout of their parts.
DROPPING = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
_FUSED = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def armed(model: nn.Module, disarm: frozenset[str] = frozenset()) -> nn.Module:
    """Return a replica with dropout in training mode and everything that normalises in eval mode."""
    twin = replica(model)
    for name, module in twin.named_modules():
        module.training = is_armed(module) and (
            name not in disarm or isinstance(module, nn.MultiheadAttention)
        )
        if name in disarm and isinstance(
            module, nn.MultiheadAttention
        ):  # whose path in eval mode is fused too
            module.dropout = 0.0
    return twin


def is_armed(module: nn.Module) -> bool:
    statistics = "running_mean" in module._buffers or "running_var" in module._buffers
    if statistics or isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return isinstance(module, (*DROPPING, *_FUSED)) if is_torchs_own(type(module)) else True


def may_drop(module: nn.Module) -> bool:
    """Say whether a module may be random in training mode by itself, and not by its parts."""
    return is_armed(module) and not isinstance(module, _FUSED)


def is_torchs_own(kind: type) -> bool:
    return kind.__module__.startswith(("torch.nn.modules", "torch.nn.utils"))
