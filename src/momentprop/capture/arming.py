"""Puts in training mode, while a model is traced, the modules that may drop and no others."""

from __future__ import annotations

from torch import nn

from momentprop.capture.replica import replica

# Layers of torch.nn whose dropout depends on their training flag. Its other layers stay in eval mode, as
# does every layer that holds running statistics; layers written by users are armed, since any may call
# F.dropout(x, p, self.training).
_ARMED = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
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
        module.training = name not in disarm and is_armed(module)
    return twin


def is_armed(module: nn.Module) -> bool:
    statistics = "running_mean" in module._buffers or "running_var" in module._buffers
    if statistics or isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return isinstance(module, _ARMED) if is_torchs_own(type(module)) else True


def is_torchs_own(kind: type) -> bool:
    return kind.__module__.startswith(("torch.nn.modules", "torch.nn.utils"))
