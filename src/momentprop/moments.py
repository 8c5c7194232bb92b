"""Moments(mean, variance): the value that flows through a converted network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Fact:
    """Something that a rule knows of its output beyond its moments; rules/facts.py declares what there is."""

    def after(self, step: Any, out: Moments) -> Fact | None:
        """Say what still holds behind an operator that acts on each element; by default nothing does."""
        return None

    def reshaped(self, out: Moments) -> Fact | None:
        """Say what still holds of the same elements in another shape; by default nothing does."""
        return None


Kind = TypeVar("Kind", bound=Fact)
Some = TypeVar("Some", bound="Moments")


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and variance of a random tensor, element by element.

    `variance` has the shape of `mean`; anything that broadcasts to it (a scalar tensor, a float) is
    expanded. The accurate tier fills `covariance`, [batch, K, K] over the K elements of each sample in
    row-major order; elsewhere it is None. Where only some outputs were asked for, `indices`, [batch, m],
    says which, and `covariance` is [batch, m, m]. Behind softmax, log-softmax and sigmoid, `logits` holds the
    moments of what went in: a Gaussian describes those better, so predictive distributions are made of them.
    `jumps`, where they were asked for, are the largest single causes of the variance. `facts` are for rules,
    which know more of values inside the network.

    >>> import torch
    >>> x = Moments(torch.zeros(2, 3), 0.25)
    >>> x.std[0].tolist()
    [0.5, 0.5, 0.5]
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    indices: Tensor | None = None
    logits: Logits | None = None
    jumps: Jumps | None = None
    facts: tuple[Fact, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mean, Tensor):
            return  # a container of something else: pytree utilities rebuild nodes with any leaves
        if isinstance(self.variance, (int, float)):
            object.__setattr__(self, "variance", torch.full_like(self.mean, self.variance))
        elif isinstance(self.variance, Tensor) and self.variance.shape != self.mean.shape:
            object.__setattr__(self, "variance", self.variance.expand_as(self.mean))

    def fact(self, kind: type[Kind]) -> Kind | None:
        """Return the fact of this kind, if there is one."""
        for fact in self.facts:
            if isinstance(fact, kind):
                return fact
        return None

    @property
    def std(self) -> Tensor:
        """The standard deviation, element by element; its gradient is 0 where the variance is."""
        positive = self.variance > 0
        # elsewhere 0, without a gradient, or NaN as the variance
        return torch.where(positive, torch.where(positive, self.variance, 1.0).sqrt(), 0.0 * self.variance)

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """Every tensor `.to(...)`, as in PyTorch."""
        mean, variance = self.mean.to(*args, **kwargs), self.variance.to(*args, **kwargs)
        covariance = None if self.covariance is None else self.covariance.to(*args, **kwargs)
        indices = None if self.indices is None else self.indices.to(mean.device)  # never a float
        logits = None if self.logits is None else self.logits.to(*args, **kwargs)
        jumps = None if self.jumps is None else self.jumps.to(*args, **kwargs)
        return Moments(mean, variance, covariance, indices, logits, jumps)

    def cpu(self) -> Self:
        return pytree.tree_map_only(Tensor, Tensor.cpu, self)

    def detach(self) -> Self:
        return pytree.tree_map_only(Tensor, Tensor.detach, self)

    @property
    def stddev(self) -> Tensor:
        """Return the standard deviation under the name that torch.distributions has for it."""
        return self.std

    @property
    def correlation(self) -> Tensor | None:
        """Return the correlation of the outputs, [batch, K, K], where their covariance is known.

        What does not vary is correlated with nothing but itself.
        """
        if self.covariance is None:
            return None
        std = self.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        scale = torch.where(std > 0, std, torch.inf).reciprocal()
        found = self.covariance * scale[..., None] * scale[..., None, :]
        one = torch.eye(std.shape[-1], dtype=torch.bool, device=self.device)
        return torch.where(one, 1.0, found.clamp(-1, 1))

    def distribution(self) -> torch.distributions.Distribution:
        """Return a normal distribution of these moments, one event for each input of the batch.

        With the covariance of all outputs it is a `MultivariateNormal` over them in row-major order; a trace
        of independent noise, of a few units of rounding, makes singular covariances regular. Without, the
        elements are independent.

        >>> import torch
        >>> Moments(torch.zeros(2, 3), 0.25).distribution().log_prob(torch.zeros(2, 3)).shape
        torch.Size([2])
        """
        if self.covariance is None or self.indices is not None:
            tiny = torch.finfo(self.dtype).tiny
            normal = torch.distributions.Normal(self.mean, self.std.clamp_min(tiny))
            return torch.distributions.Independent(normal, max(self.mean.dim() - 1, 0))
        *batch, k, _ = self.covariance.shape
        largest = self.covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        rounding = torch.finfo(self.dtype)
        noise = (10 * k * rounding.eps * largest).clamp_min(rounding.tiny)
        regular = self.covariance + noise * torch.eye(k, dtype=self.dtype, device=self.device)
        return torch.distributions.MultivariateNormal(self.mean.reshape(*batch, k), regular)

    def numpy(self) -> dict[str, Any]:
        """Return mean, std, and covariance and indices where they are known, as numpy arrays by name."""
        names = ("mean", "std", "covariance", "indices")
        given = {name: getattr(self, name) for name in names}
        return {name: v.detach().cpu().numpy() for name, v in given.items() if v is not None}

    def __len__(self) -> int:
        """Count the inputs of the batch."""
        return len(self.mean)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """Choose inputs of the batch, with everything that is known of them.

        >>> import torch
        >>> x = Moments(torch.arange(6.0).reshape(2, 3), 0.25)
        >>> x[0].mean.tolist(), x[-1:].shape
        ([0.0, 1.0, 2.0], torch.Size([1, 3]))
        """
        if isinstance(index, tuple) or index is None or index is ...:
            raise TypeError(
                "an index chooses inputs of the batch; index .mean, .variance and .covariance else"
            )
        if self.covariance is not None and len(self.covariance) != len(self.mean):
            raise TypeError("the batch is not the first dimension; index .mean, .variance and .covariance")
        return _over_batch(lambda parts, dim: parts[0][(slice(None),) * dim + (index,)], self)

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return True  # also an empty batch is not nothing

    @staticmethod
    def cat(parts: Sequence[Some]) -> Some:
        """Put batches one behind the other, as `torch.cat` does.

        >>> import torch
        >>> Moments.cat([Moments(torch.zeros(2, 3), 0.25), Moments(torch.ones(1, 3), 0.5)]).shape
        torch.Size([3, 3])
        """
        return _over_batch(lambda tensors, dim: torch.cat(tensors, dim), *parts)

    @staticmethod
    def stack(parts: Sequence[Some]) -> Some:
        """Make a batch of single inputs, as `torch.stack` does; data loaders collate with it."""
        return _over_batch(lambda tensors, dim: torch.stack(tensors, dim), *parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._says())})"

    def _says(self) -> list[str]:
        says = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"device={self.device}"]
        return says if self.covariance is None else [*says, "with covariance"]

    def _repr_html_(self) -> str:
        """Show the first inputs in notebooks, as mean +- std."""
        mean, std = (v.detach().reshape(len(v) if v.dim() else 1, -1)[:5, :8] for v in (self.mean, self.std))
        rows = [
            "".join(f"<td>{m:.4g} &plusmn; {s:.2g}</td>" for m, s in zip(means, stds, strict=True))
            for means, stds in zip(mean.tolist(), std.tolist(), strict=True)
        ]
        return f"<p><code>{self!r}</code></p><table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


@dataclass(frozen=True, eq=False)
class Logits:
    """Holds what went into a softmax or log-softmax over `dim`, or into a sigmoid (`dim` is None)."""

    moments: Moments
    dim: int | None

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        return Logits(self.moments.to(*args, **kwargs), self.dim)


@dataclass(frozen=True, eq=False)
class Jumps:
    """The m inputs or units whose dropping moves an output most, element by element: both [m, *shape].

    They drop independently of each other. Of the output's variance, sum p (1-p) effect^2 is due to them.
    """

    effects: Tensor  # what the output changes by when the source is dropped
    probabilities: Tensor  # of being dropped, p

    def to(self, *args: Any, **kwargs: Any) -> Jumps:
        return Jumps(self.effects.to(*args, **kwargs), self.probabilities.to(*args, **kwargs))

    @property
    def variance(self) -> Tensor:
        """Return the part of the output's variance that they explain."""
        p = self.probabilities
        return (p * (1 - p) * self.effects.square()).sum(0)


_FIELDS = ("mean", "variance", "covariance", "indices", "logits", "jumps")
pytree.register_pytree_node(
    Moments,
    lambda m: ([getattr(m, n) for n in _FIELDS], None),
    lambda values, _: Moments(*values),
    serialized_type_name="momentprop.Moments",
    flatten_with_keys_fn=lambda m: ([(pytree.GetAttrKey(n), getattr(m, n)) for n in _FIELDS], None),
)
pytree.register_pytree_node(
    Logits,
    lambda x: ([x.moments], x.dim),
    lambda values, dim: Logits(next(iter(values)), dim),
    serialized_type_name="momentprop.Logits",
    flatten_with_keys_fn=lambda x: ([(pytree.GetAttrKey("moments"), x.moments)], x.dim),
)
pytree.register_pytree_node(
    Jumps,
    lambda j: ([j.effects, j.probabilities], None),
    lambda values, _: Jumps(*values),
    serialized_type_name="momentprop.Jumps",
    flatten_with_keys_fn=lambda j: (
        [(pytree.GetAttrKey(n), getattr(j, n)) for n in ("effects", "probabilities")],
        None,
    ),
)


_BATCH_SECOND = ("effects", "probabilities", "kept")  # tensors with something else in front


def _over_batch(change: Callable[[tuple[Tensor, ...], int], Tensor], *parts: Any) -> Any:
    """Change every tensor of moments; `change(tensors, dim)` is told which dimension is the batch."""

    def at(path: Any, *tensors: Any) -> Any:
        return None if tensors[0] is None else change(tensors, int(path[-1].name in _BATCH_SECOND))

    return pytree.tree_map_with_path(at, *parts)


# what torch.load(weights_only=True) may make of a file
torch.serialization.add_safe_globals([Moments, Logits, Jumps])


def is_moments(value: object) -> bool:
    return isinstance(value, Moments)


def mean_of(value: Any) -> Any:
    """The mean of a random value; a deterministic value is its own mean."""
    return value.mean if isinstance(value, Moments) else value


def variance_of(value: Any) -> Any:
    """The variance of a random value; zero for a deterministic one."""
    if isinstance(value, Moments):
        return value.variance
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0


def plain(moments: Moments) -> Moments:
    """Drop what rules know beside moments."""
    logits = moments.logits
    if logits is not None:
        logits = Logits(plain(logits.moments), logits.dim)
    return dataclasses.replace(moments, logits=logits, facts=())


def as_moments(value: Any) -> Any:
    """A tensor as Moments with zero variance; anything else is returned unchanged."""
    return Moments(value, torch.zeros_like(value)) if isinstance(value, Tensor) else value


def as_output(value: Any) -> Any:
    """What a network returns of a value: numbers as Moments, without what rules know; all else as it is."""
    if is_moments(value):
        return plain(value)
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return as_moments(value) if is_number else value
