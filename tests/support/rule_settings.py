"""An operator with its arguments, as rules are tested with them.

`X(2, 3)` stands for a random tensor of that shape, `C(2, 3)` for a constant one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import momentprop.rules  # noqa: F401  (registers the rules)
from linear_part import LinearPart, flat, linear_part
from momentprop import tiers
from momentprop.graph.schema import bind
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.registry import Rule

EXTREME_MEANS = (-1e6, -1e3, -1.0, -1e-6, -1e-30, 0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6)
EXTREME_VARIANCES = (0.0, 1e-30, 1e-20, 1e-10, 1e-4, 1.0, 1e4, 1e12)


class X:
    """A random tensor."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return "X" + "x".join(map(str, self.shape))


class C:
    """A constant tensor; `make(shape, generator)` draws other values than normal ones.

    Those are data rather than parameters: they need no gradient.
    """

    def __init__(self, *shape: int, make: Callable[..., Tensor] | None = None) -> None:
        self.shape, self.make = shape, make

    def __repr__(self) -> str:
        return "C" + "x".join(map(str, self.shape))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


Distribution = Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, Tensor]]


def moderate(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means around 0 and variances around 1, as in a network."""
    mean, log_variance = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return mean, log_variance.exp()


def extreme(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each element from the corners of what has to work, in any combination."""

    def choose(values: tuple[float, ...]) -> Tensor:
        index = torch.randint(len(values), shape, generator=generator)
        return torch.tensor(values, dtype=torch.float64)[index]

    return choose(EXTREME_MEANS), choose(EXTREME_VARIANCES)


def fixed(mean: float | None = None, variance: float | None = None) -> Distribution:
    """`moderate`, but with this mean or variance everywhere."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        e, v = moderate(shape, generator)
        e = e if mean is None else torch.full_like(e, mean)
        return e, v if variance is None else torch.full_like(v, variance)

    return draw


@dataclass(frozen=True)
class Setting:
    """An operator with its arguments, and the tier whose rule is tested."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fidelity: str = "paper"
    n_samples: int = 4000
    vectorizes: bool = True  # torch.func.vmap can run it

    def __str__(self) -> str:
        given = [str(a).replace(" ", "") for a in self.args] + [f"{k}={v}" for k, v in self.kwargs.items()]
        tier = "" if self.fidelity == "paper" else f"[{self.fidelity}]"
        return f"{self.op.name().removeprefix('aten::')}{tier}({','.join(given)})"

    @property
    def rule(self) -> Rule:
        rule = tiers.named(self.fidelity).rules.find(self.op)
        assert rule is not None, f"{self.op} has no rule"
        return rule

    def arguments(
        self, dtype: torch.dtype = torch.float64, draw: Distribution = moderate, seed: int = 0
    ) -> tuple[Any, ...]:
        """The arguments with Moments for X and tensors for C: float32 numbers, in either dtype."""
        generator = torch.Generator().manual_seed(seed)

        def fill(value: Any) -> Any:
            if isinstance(value, X):
                mean, variance = draw(value.shape, generator)
                return Moments(mean.float().to(dtype), variance.float().to(dtype))
            if isinstance(value, C) and value.make is not None:
                made = value.make(value.shape, generator)
                return made.float().to(dtype) if made.is_floating_point() else made
            if isinstance(value, C):
                return torch.randn(value.shape, generator=generator).to(dtype)
            return [fill(v) for v in value] if isinstance(value, list) else value

        return tuple(fill(a) for a in self.args)

    def differentiable(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Means and variances of the random arguments, and the constants that are parameters."""
        kinds = pytree.tree_leaves(self.args)
        values = pytree.tree_leaves(args, is_leaf=is_moments)
        wanted = [v for k, v in zip(kinds, values, strict=True) if isinstance(k, X) or is_parameter(k)]
        return [t for t in pytree.tree_leaves(wanted) if t is not None]

    def propagate(self, args: tuple[Any, ...]) -> list[Moments]:
        """The rule's outputs; where the operator returns a list, all of them."""
        return flat(self.rule(*args, **self.kwargs))

    def linear_part(self, args: tuple[Any, ...]) -> LinearPart:
        return linear_part(self.rule, *args, **self.kwargs)

    def apply(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The operator itself at the means."""
        return flat(self.op(*pytree.tree_map(mean_of, args, is_leaf=is_moments), **self.kwargs))

    def apply_to_many(self, args: tuple[Any, ...], values: list[Tensor]) -> list[Tensor]:
        """The operator itself at many values of its random arguments, stacked in front."""
        leaves, spec = pytree.tree_flatten(args, is_leaf=is_moments)

        def run(*given: Tensor) -> Any:
            rest = iter(given)
            filled = [next(rest) if is_moments(leaf) else leaf for leaf in leaves]
            return tuple(flat(self.op(*pytree.tree_unflatten(filled, spec), **self.kwargs)))

        if self.vectorizes:
            return list(torch.func.vmap(run)(*values))
        return [torch.stack(outputs) for outputs in zip(*map(run, *values), strict=True)]


def setting(op: OpOverload, *args: Any, **kwargs: Any) -> Setting:
    return Setting(op, args, kwargs)


def is_parameter(argument: Any) -> bool:
    return isinstance(argument, C) and argument.make is None


def reason_of(setting: Setting, *random: str) -> str | None:
    """Why the rule refuses: with the setting's random arguments, or with these by name."""
    arguments = bind(setting.op, setting.arguments(), setting.kwargs)
    if not random:
        leaves = {k: pytree.tree_leaves(v, is_leaf=is_moments) for k, v in arguments.items()}
        random = tuple(k for k, v in leaves.items() if any(map(is_moments, v)))
    refuses = setting.rule.refuses
    return None if refuses is None else refuses(arguments, frozenset(random))
