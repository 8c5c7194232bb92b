"""Dropout for networks that have none: a copy with dropout before chosen layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from momentprop.capture.choice import Where, chooser
from momentprop.errors import DropProbabilityError

Model = TypeVar("Model", bound=nn.Module)

_NAME = "input_dropout"
# run their children one after the other, or are never called themselves: a child more would do harm
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHOWN = 12


def with_dropout(
    model: Model,
    p: float,
    where: Where = nn.Linear,
    *,
    dropout: Callable[[float], nn.Module] = nn.Dropout,
) -> Model:
    """A copy of the model with dropout before every chosen layer; the model itself is left alone.

    Dropout acts on a layer's first input. It follows `train()` and `eval()` like any other, so in eval mode
    the copy computes what the model does. The copy has the same parameters under the same names:
    `state_dict`s fit both ways. It can be trained, sampled (`mp.monte_carlo`) and converted (`mp.convert`).

    Args:
        model: any module.
        p: the probability to drop, 0 <= p < 1.
        where: which layers: a class or a tuple of classes; a regular expression that a layer's whole name
            matches, such as `r"head\\.fc\\d"`; or a function (name, module) -> bool. *Every* such layer gets
            its dropout, the first one too, whose input is the network's: leave it out with a name or a
            function if pixels shall not be dropped. Containers (`nn.Sequential`, ...) are not chosen.
        dropout: makes a dropout of a probability; `nn.Dropout2d` drops whole channels before convolutions.

    Raises:
        ValueError: no layer is chosen; or one has such a dropout already.
        DropProbabilityError: p is not in 0 <= p < 1.

    Parts whose parameters are read without calling them get nothing: so `nn.MultiheadAttention.out_proj` is
    not chosen. Choose the attention layer itself.

    >>> import torch, momentprop as mp
    >>> plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> model = mp.with_dropout(plain, 0.1, where="2")
    >>> mp.convert(model, torch.zeros(1, 4))(torch.randn(5, 4)).std.shape
    torch.Size([5, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if not 0 <= p < 1:
        raise DropProbabilityError(f"p must be in 0 <= p < 1, not {p}")
    model = copy.deepcopy(model)
    is_chosen = chooser(where, "where")
    uncalled = _uncalled(model)
    layers = {name: m for name, m in model.named_modules() if _can_be_chosen(m)}
    chosen = {name: m for name, m in layers.items() if is_chosen(name, m)}
    if not chosen.keys() - uncalled:
        raise ValueError(_nothing_chosen(where, chosen, layers.keys() - uncalled, model))
    for name, layer in chosen.items():
        if name not in uncalled:
            _insert(name, layer, dropout(p))
    return model


def _can_be_chosen(module: nn.Module) -> bool:
    return not isinstance(module, (*_CONTAINERS, nn.modules.dropout._DropoutNd))


def _uncalled(model: nn.Module) -> set[str]:
    """Names of parts whose parameters are read without calling them."""
    attentions = [name for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    return {f"{name}.out_proj".removeprefix(".") for name in attentions}


def _insert(name: str, layer: nn.Module, dropout: nn.Module) -> None:
    if hasattr(layer, _NAME):
        raise ValueError(f"{name or 'the model itself'} has a part called {_NAME!r} already")
    # a module without parameters does not show in a state_dict, and follows train() and eval()
    layer.add_module(_NAME, dropout.train(layer.training))
    layer.register_forward_pre_hook(_drop_input, with_kwargs=True)


def _drop_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first tensor dropped, wherever it stands among the inputs: attention takes one three times."""
    values = [*args, *kwargs.values()]
    first = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    if first is None:
        return args, kwargs
    dropped = layer.get_submodule(_NAME)(first)
    return (
        tuple(dropped if v is first else v for v in args),
        {k: dropped if v is first else v for k, v in kwargs.items()},
    )


def _nothing_chosen(where: Where, uncalled: dict[str, Any], layers: set[str], model: nn.Module) -> str:
    if uncalled:
        names = ", ".join(sorted(uncalled))
        reason = f"only {names}, whose parameters are read without calling it; choose nn.MultiheadAttention"
    else:
        reason = "no layer"
    modules = dict(model.named_modules())
    own = [n for n in modules if n in layers and next(modules[n].parameters(recurse=False), None) is not None]
    shown = ", ".join(f"{n or 'the model itself'} ({type(modules[n]).__name__})" for n in own[:_SHOWN])
    more = f", and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
    return f"where={where!r} chooses {reason}. Layers of the model: {shown or 'none'}{more}"
