"""The networks of the architectures benchmark, each trained on a small task, once, and held-out inputs.

Images are the digits that ship with scikit-learn; sequences and segmentations are synthetic, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import architectures_networks as networks
import torch
import torch.nn.functional as F
from images import CACHE
from torch import Tensor, nn

from momentprop_reproduction.demo.digits import load as load_digits
from momentprop_reproduction.running.training import fit, seeded

N_TRAIN, N_TEST = 4096, 512  # of synthetic tasks
KEYS, VALUES = 8, 4  # of the lookup task
MARKERS, LENGTH = 3, 16  # of the tagging task
WORDS, SENTENCE = 40, 12  # of the sentence task
SIDE = 24  # of segmented images


@dataclass(frozen=True)
class Data:
    """Inputs, and the class of each (or of each of its positions), -100 where none is asked for."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """A trained network with inputs it has not seen."""

    model: nn.Module
    inputs: Tensor
    accuracy: float  # on held-out data, of the plain network
    chance: float  # the most frequent class


def digits() -> Data:
    """Images 8 x 8 of the ten digits; every fifth is held out."""
    images, y = load_digits()
    x = 2 * images - 1
    held_out = torch.arange(len(x)) % 5 == 0
    return Data((x[~held_out], y[~held_out]), (x[held_out], y[held_out]))


def lookup(query_first: bool) -> Data:
    """A query and items, each a key and a value in one token: which value has the queried key?

    With the query first, sequences have 3 to 8 items, the queried one among them, and end in padding (token
    0); with the query last all have 8. One attention weight decides, so its dropout is a rare, large jump.
    """

    def draw(n: int) -> tuple[Tensor, Tensor]:
        keys = torch.rand(n, KEYS).argsort(1)
        values = torch.randint(VALUES, (n, KEYS))
        count = torch.randint(3, KEYS + 1, (n, 1)) if query_first else torch.full((n, 1), KEYS)
        chosen = (torch.rand(n, 1) * count).long()
        items = torch.where(torch.arange(KEYS) < count, 1 + KEYS + keys * VALUES + values, 0)
        query = 1 + keys.gather(1, chosen)
        tokens = torch.cat([query, items] if query_first else [items, query], 1)
        return tokens, values.gather(1, chosen).squeeze(1)

    return Data(draw(N_TRAIN), draw(N_TEST))


def sentences() -> Data:
    """Which of three moods do the words of a sentence have together? Of 40 words each has a fixed weight for
    every mood, and four turn the next one round. Sentences begin with token 1 and end in padding, token 0."""
    weights = torch.randn(WORDS, 3)
    weights[4:] -= weights[4:].mean(0)  # no mood more frequent than the others

    def draw(n: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(WORDS, (n, SENTENCE))
        used = torch.arange(SENTENCE) < torch.randint(SENTENCE // 2, SENTENCE + 1, (n, 1))
        turned = F.pad(words < 4, (1, -1))
        each = weights[words] * torch.where(turned, -1.0, 1.0)[..., None] * (used & (words >= 4))[..., None]
        tokens = F.pad(torch.where(used, words + 2, 0), (1, 0), value=1)
        return tokens, each.sum(1).argmax(1)

    return Data(draw(N_TRAIN), draw(N_TEST))


def tagging() -> Data:
    """Words and three markers: a word's tag says whether the markers before and behind it are the same,
    and whether the one before is the first; markers have no tag."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        tokens = MARKERS + torch.randint(9, (n, LENGTH))
        marked = torch.rand(n, LENGTH) < 0.25
        marked[:, [0, -1]] = True
        tokens = torch.where(marked, torch.randint(MARKERS, (n, LENGTH)), tokens)
        before, behind = tokens.clone(), tokens.clone()
        for t in range(1, LENGTH):
            before[:, t] = torch.where(marked[:, t], tokens[:, t], before[:, t - 1])
            behind[:, -1 - t] = torch.where(marked[:, -1 - t], tokens[:, -1 - t], behind[:, -t])
        tags = torch.where(before == behind, 0, torch.where(before == 0, 1, 2))
        return tokens, torch.where(marked, -100, tags)

    return Data(draw(N_TRAIN), draw(N_TEST))


def shapes() -> Data:
    """Noisy images of a disk and a square, of like size and brightness: which pixels belong to which?"""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        classes = torch.zeros(n, SIDE, SIDE, dtype=torch.long)
        for label in (1, 2):
            centre = 4 + (SIDE - 8) * torch.rand(2, n, 1, 1)
            size = 3 + 2 * torch.rand(n, 1, 1)
            down, right = (row - centre[0]).abs(), (column - centre[1]).abs()
            inside = (
                (down**2 + right**2).sqrt() < size if label == 1 else torch.maximum(down, right) < 0.9 * size
            )
            classes = torch.where(inside, label, classes)
        brightness = 0.5 + torch.rand(n, 1, 1)
        images = brightness * (classes > 0) + 0.3 * torch.randn(n, SIDE, SIDE)
        return images.unsqueeze(1), classes

    return Data(draw(512), draw(64))


@dataclass(frozen=True)
class Recipe:
    build: Callable[[], nn.Module]
    data: Callable[[], Data]
    epochs: int
    learning_rate: float = 3e-3
    n_inputs: int = 50
    classes_dim: int = 1


_TOKENS = 1 + KEYS + KEYS * VALUES
RECIPES = {
    "vit": Recipe(networks.VisionTransformer, digits, 40, 2e-3),
    "bert": Recipe(partial(networks.Encoder, WORDS + 2, SENTENCE + 1, 3), sentences, 20, 1e-3),
    "bert_lookup": Recipe(
        partial(networks.Encoder, _TOKENS, KEYS + 1, VALUES), partial(lookup, True), 30, 2e-3
    ),
    "wide_resnet": Recipe(networks.WideResNet, digits, 12),
    "unet_transposed": Recipe(partial(networks.UNet, 3, False), shapes, 30, n_inputs=16),
    "unet_bilinear": Recipe(partial(networks.UNet, 3, True), shapes, 30, n_inputs=16),
    "gru_tagger": Recipe(partial(networks.Tagger, nn.GRU, 12, 3), tagging, 20, 5e-3, classes_dim=2),
    "lstm_tagger": Recipe(partial(networks.Tagger, nn.LSTM, 12, 3), tagging, 20, 5e-3, classes_dim=2),
    "decoder_lookup": Recipe(
        partial(networks.Decoder, _TOKENS, KEYS + 1, VALUES), partial(lookup, False), 30, 2e-3
    ),
    "convnext": Recipe(networks.ConvNeXt, digits, 25),
}
DENSE = ("unet_transposed", "unet_bilinear")  # an output per pixel


def load(name: str, seed: int = 0, epochs: int | None = None) -> Trained:
    """A trained network; trained now, if it is not in the cache."""
    recipe = RECIPES[name]
    epochs = epochs or recipe.epochs
    path = CACHE / "architectures" / f"{name}-seed{seed}-epochs{epochs}.pt"
    with seeded(seed):
        data = recipe.data()
        model = recipe.build()
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
            model.eval()
        else:
            loss = partial(_loss, dim=recipe.classes_dim)
            fit(model, loss, *data.train, epochs=epochs, batch_size=64, learning_rate=recipe.learning_rate)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
    x, y = data.test
    asked = y != -100
    with torch.no_grad():
        found = model(x).argmax(recipe.classes_dim)
    accuracy = (found == y)[asked].float().mean().item()
    chance = y[asked].bincount().max().item() / asked.sum().item()
    return Trained(model, x[: recipe.n_inputs], accuracy, chance)


def _loss(logits: Tensor, target: Tensor, dim: int) -> Tensor:
    return F.cross_entropy(logits.movedim(dim, 1), target)
