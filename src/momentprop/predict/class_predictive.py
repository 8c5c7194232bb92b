"""The predictive distribution over classes: probabilities, and how uncertain they are themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.errors import MomentpropError
from momentprop.predict.batched import Batched


@dataclass(eq=False)
class ClassPredictive(Batched):
    """A categorical distribution over the classes in dimension 1, [batch, K, ...], that is itself uncertain.

    `probs` is what to predict with. Uncertainties are entropies, in nats: `total` is that of `probs`,
    `aleatoric` the expected entropy, and `epistemic` the difference, which is the mutual information of label
    and weights. `probs_variance` and `aleatoric` are None where the method gives the mean alone.

    >>> import momentprop as mp
    >>> p = mp.classify(mp.Moments(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]), 1.0))
    >>> p.label.tolist(), bool((p.epistemic > 0).all())
    ([0, 2], True)
    >>> len(p), p[1:].label.tolist()
    (2, [2])
    """

    log_probs: Tensor
    probs_variance: Tensor | None = None
    aleatoric: Tensor | None = None

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of the probabilities, in nats: [batch, ...]."""
        return torch.special.entr(self.probs).sum(1)

    @property
    def total(self) -> Tensor:
        """Return the total uncertainty, which is the entropy."""
        return self.entropy

    @property
    def epistemic(self) -> Tensor:
        """Return what the network's own uncertainty adds: the total less the aleatoric part."""
        if self.aleatoric is None:
            raise MomentpropError(
                "this method gives probabilities only; method='integrate' also gives their uncertainty"
            )
        return (self.total - self.aleatoric).clamp_min(0)

    @property
    def confidence(self) -> Tensor:
        """The largest probability."""
        return self.probs.amax(1)

    @property
    def label(self) -> Tensor:
        return self.log_probs.argmax(1)

    @property
    def batch_shape(self) -> torch.Size:
        return self.log_probs.select(1, 0).shape

    @property
    def abstain(self) -> Tensor:
        """Say which inputs have no answer: their probabilities are NaN, and `label` means nothing."""
        return self.log_probs.isnan().any(1)

    def log_prob(self, target: Tensor) -> Tensor:
        """Return the log probability of class indices [batch, ...]."""
        k = self.log_probs.shape[1]
        if target.shape != self.batch_shape:
            raise ValueError(
                f"target has shape {tuple(target.shape)}; expected class indices {tuple(self.batch_shape)}"
            )
        if target.is_floating_point() or (
            target.numel() and not torch.compiler.is_compiling() and not 0 <= target.min() <= target.max() < k
        ):
            raise ValueError(f"target must hold class indices from 0 to {k - 1}")
        return self.log_probs.gather(1, target.long().unsqueeze(1)).squeeze(1)

    def nll(self, target: Tensor) -> Tensor:
        """Negative log-likelihood of each target."""
        return -self.log_prob(target)

    def sample(self, shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Labels [*shape, batch, ...]."""
        count = math.prod(shape)
        flat = self.probs.movedim(1, -1).reshape(-1, self.log_probs.shape[1])
        drawn = torch.multinomial(flat, max(count, 1), replacement=True, generator=generator)
        return drawn.T[:count].reshape(*shape, *self.batch_shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for serving."""
        out = {
            "probs": self.probs.tolist(),
            "label": self.label.tolist(),
            "confidence": self.confidence.tolist(),
            "total": self.total.tolist(),
            "abstain": self.abstain.tolist(),
        }
        if self.aleatoric is not None:
            out |= {"aleatoric": self.aleatoric.tolist(), "epistemic": self.epistemic.tolist()}
        return out

    def distribution(self) -> torch.distributions.Categorical:
        """Return the distribution of labels [batch, ...] as PyTorch has it."""
        return torch.distributions.Categorical(logits=self.log_probs.movedim(1, -1))

    def __repr__(self) -> str:
        return f"ClassPredictive(classes={self.log_probs.shape[1]}, batch_shape={tuple(self.batch_shape)})"


Probabilities = Tensor | ClassPredictive


def probs_of(value: Probabilities) -> Tensor:
    """Return the probabilities of a predictive distribution; a tensor holds them itself."""
    if isinstance(value, ClassPredictive):
        return value.probs
    return _tensor(value, "probabilities")


def log_probs_of(value: Probabilities) -> Tensor:
    """Return the log probabilities of a predictive distribution; a tensor holds them itself."""
    if isinstance(value, ClassPredictive):
        return value.log_probs
    return _tensor(value, "log probabilities")


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"give {what}, or what mp.classify makes of a network's output, not {type(value).__name__}"
        )
    return value


pytree.register_dataclass(ClassPredictive, serialized_type_name="momentprop.ClassPredictive")
torch.serialization.add_safe_globals([ClassPredictive])
