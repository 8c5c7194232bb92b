"""A digit classifier that meets digits it was never shown.

A small convolutional network with dropout learns the classes 0-4 of scikit-learn's 8x8 digits. At test
time it also gets 5-9: a network that knows what it does not know answers those with a larger entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.errors import MissingExtraError
from momentprop.experiments.timing import best_seconds
from momentprop.experiments.training import Progress, fit, seeded

N_CLASSES = 5  # 0-4 are known, 5-9 novel
OURS = "momentprop"

Method = Callable[[Tensor], mp.ClassPredictive]


@dataclass(frozen=True)
class DigitsResult:
    """What `run` measured: predictive entropies of the test images, by method, and a table of numbers."""

    known_entropy: dict[str, Tensor]
    novel_entropy: dict[str, Tensor]
    table: dict[str, dict[str, float | None]]
    n_train: int
    n_known: int
    n_novel: int


def network(channels: int = 16, width: int = 128, drop_probability: float = 0.3) -> nn.Sequential:
    """Two blocks of convolution, ReLU, max pooling and dropout, then a dense layer with dropout."""
    layers: list[nn.Module] = []
    for n_in, n_out in [(1, channels), (channels, 2 * channels)]:
        layers += [
            nn.Conv2d(n_in, n_out, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(drop_probability),
        ]
    n_features = 2 * channels * 2 * 2  # 8x8 pixels, halved twice
    layers += [nn.Flatten(), nn.Linear(n_features, width), nn.ReLU(), nn.Dropout(drop_probability)]
    return nn.Sequential(*layers, nn.Linear(width, N_CLASSES))


def run(
    seed: int = 0,
    epochs: int = 100,
    *,
    n_samples: int = 50,
    truth_samples: int = 1000,
    fidelity: str = "accurate",
    repeats: int = 7,
    progress: Progress | None = None,
) -> DigitsResult:
    """Train on 0-4, then predict 0-4 and 5-9 with the network as it is, MC dropout, and converted.

    Args:
        seed: everything but the times follows from it; the caller's random state is left alone.
        epochs: passes over the training images.
        n_samples: forward passes of MC dropout.
        truth_samples: forward passes of the MC dropout that entropies are compared with.
        fidelity: the tier of rules, as in `mp.convert`.
        repeats: how often each method is timed.
        progress: called as progress(done, total) while training.

    Returns:
        Entropies and numbers. In the table: `accuracy` and `nll` on test images of known classes, `auroc`
        of the entropy for telling novel from known, `entropy_correlation` with that of MC dropout with
        `truth_samples`, `seconds` for one prediction of all test images.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    images, labels = _load()
    with seeded(seed):
        known = torch.nonzero(labels < N_CLASSES).squeeze(1)
        known = known[torch.randperm(len(known))]
        train, test = known.tensor_split([2 * len(known) // 3])
        model = network()
        fit(
            model,
            F.cross_entropy,
            images[train],
            labels[train],
            epochs=epochs,
            batch_size=64,
            learning_rate=1e-3,
            progress=progress,
        )
    novel = torch.nonzero(labels >= N_CLASSES).squeeze(1)
    shown = images[torch.cat([test, novel])]

    bnn = mp.convert(model, images[:2], fidelity)

    def sampled(x: Tensor, n: int = n_samples, seed: int = seed) -> mp.ClassPredictive:
        return mp.classify(mp.monte_carlo(bnn, x, n, seed, keep_samples=True))

    methods: dict[str, Method] = {
        "NN": lambda x: mp.classify(model(x)),
        f"MC T={n_samples}": sampled,
        OURS: lambda x: mp.classify(bnn(x), "paper" if fidelity == "paper" else "integrate"),
    }
    with torch.no_grad():
        # a seed of its own: truth must not contain the samples it judges
        truth = sampled(shown, truth_samples, seed + 1).entropy
        predicted = {name: predict(shown) for name, predict in methods.items()}
        seconds = best_seconds({name: partial(f, shown) for name, f in methods.items()}, repeats)
    table: dict[str, dict[str, float | None]] = {}
    n_known = len(test)
    for name, p in predicted.items():
        table[name] = {
            "accuracy": (p.label[:n_known] == labels[test]).double().mean().item(),
            "nll": F.nll_loss(p.log_probs[:n_known], labels[test]).item(),
            "auroc": _auroc(p.entropy, n_known),
            "entropy_correlation": torch.corrcoef(torch.stack([p.entropy, truth]))[0, 1].item(),
            "seconds": seconds[name],
        }
    return DigitsResult(
        known_entropy={name: p.entropy[:n_known] for name, p in predicted.items()},
        novel_entropy={name: p.entropy[n_known:] for name, p in predicted.items()},
        table=table,
        n_train=len(train),
        n_known=n_known,
        n_novel=len(novel),
    )


def _load() -> tuple[Tensor, Tensor]:
    """Images in 0..1 as [n, 1, 8, 8], and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "data") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target, dtype=torch.int64)


def _auroc(score: Tensor, n_known: int) -> float:
    """Area under the ROC curve: the chance that a novel image scores above a known one."""
    from sklearn.metrics import roc_auc_score

    is_novel = torch.arange(len(score)) >= n_known
    return float(roc_auc_score(is_novel.numpy(), score.double().numpy()))
