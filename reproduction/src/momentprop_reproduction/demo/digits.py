"""A digit classifier that meets digits it was never shown.

A small convolutional network with dropout learns the classes 0-4 of 8x8 images of digits. At test time it
also gets 5-9: a network that knows what it does not know answers those with a larger entropy.

The images lie beside this file, so that the demo downloads nothing. They are the 1,797 test images of
"Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998; UCI Machine Learning
Repository, CC BY 4.0), in the order of `sklearn.datasets.load_digits`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.evaluate import metrics
from momentprop.tiers import ACCURATE, PAPER, named
from momentprop_reproduction.running.timing import best_seconds
from momentprop_reproduction.running.training import Progress, fit, seeded

N_CLASSES = 5  # 0-4 are known, 5-9 novel
OURS = "momentprop"
_N_IMAGES = 1797

Method = Callable[[Tensor], mp.ClassPredictive]


@dataclass(frozen=True)
class DigitsResult:
    """Holds what `run` measured: predictive entropies of test images by method, and a table of numbers."""

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
    fidelity: str = ACCURATE.name,
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
    """
    images, labels = load()
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
        OURS: lambda x: mp.classify(bnn(x), PAPER.name if named(fidelity) is PAPER else "integrate"),
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
            "auroc": metrics.auroc(p.entropy[:n_known], p.entropy[n_known:]).value,
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


def load() -> tuple[Tensor, Tensor]:
    """Read the images, in 0..1 as [1797, 1, 8, 8], and their labels."""
    packed = (files("momentprop_reproduction.demo") / "digits.zlib").read_bytes()
    values = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
    labels = values[-_N_IMAGES:].long()
    return values[:-_N_IMAGES].view(-1, 1, 8, 8).float() / 16, labels
