"""Training of the CIFAR-10 networks: the schedule, the faster twin, and going on after an interruption."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from momentprop_reproduction.data import Images
from momentprop_reproduction.experiments import cifar_training
from momentprop_reproduction.experiments.cifar_training import Schedule, TrainingSettings, train
from momentprop_reproduction.paper_network import CLASSES, BitDropout, for_training, network, normalize
from momentprop_reproduction.running.units import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TrainingSettings(batch_size=32, max_epochs=6, n_images=120)


@pytest.fixture(autouse=True)
def coloured_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one colour a class, sorted by class as the real ones, instead of CIFAR-10."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat_interleave(40)
    colours = torch.randint(256, (10, 3, 1, 1), generator=generator)[labels]
    noise = torch.randint(-60, 60, (400, 3, 32, 32), generator=generator)
    images = (colours + noise).clamp(0, 255).to(torch.uint8)

    def load(split: str, root: Any = None) -> Images:
        return Images(images, labels, CLASSES, "made up")

    monkeypatch.setattr(cifar_training, "load_cifar10", load)


def test_inputs_are_those_of_the_authors() -> None:
    assert normalize(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1, -0.6, 1])


def test_the_twin_for_training_gives_the_same_outputs_and_gradients() -> None:
    model = network(10).double()
    twin = for_training(copy.deepcopy(model))
    x, y = torch.randn(7, 3, 32, 32, dtype=torch.float64), torch.arange(7)
    for m in (model, twin):
        F.cross_entropy(m.eval()(x), y).backward()
    torch.testing.assert_close(twin(x), model(x))
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_twin_shares_parameters_and_drops_everywhere_the_network_does() -> None:
    model = network(5)
    twin = for_training(model)
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert list(twin.state_dict()) == list(model.state_dict())
    assert sum(isinstance(layer, BitDropout) for layer in twin) == 5


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bit_dropout_drops_with_its_probability(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.ones(50, 8, 30, 33).contiguous(memory_format=memory_format)
    y = BitDropout(0.3)(x)
    assert torch.isclose(y[y > 0], torch.tensor(1 / 0.7)).all()
    n = y.numel()
    for dropped in ((y == 0).double().mean(), (y[:-1] == y[1:]).double().mean() - 0.28):  # 0.58 are equal
        assert abs(dropped - 0.3) < 5 * (0.25 / n) ** 0.5
    assert BitDropout(0.3).eval()(x) is x


def test_plateaus_and_the_end() -> None:
    settings = TrainingSettings(learning_rate=1.0)
    schedule = Schedule(1.0)
    rates = []
    for nll in [3.0, 2.0] + [2.5] * 4 + [1.0] + [1.5] * 10:
        assert not schedule.ends(settings)
        schedule.step(0.0, nll, settings)
        rates.append(schedule.learning_rate)
    # four epochs without improvement change nothing, five do, ten end it
    assert rates == pytest.approx([1.0] * 11 + [0.85] * 5 + [0.85**2])
    assert schedule.ends(settings)
    assert (schedule.best, schedule.best_epoch, schedule.epoch) == (1.0, 7, 17)


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    results, weights = [], []
    for name, stop in (("whole", None), ("interrupted", 5)):
        (tmp_path / name).mkdir()

        def report(done: float, total: float, label: str, stop: int | None = stop) -> None:
            if done == stop:
                raise KeyboardInterrupt

        arguments: dict[str, Any] = {"setting": "five", "seed": 3, "training": TINY}
        if stop:
            with pytest.raises(KeyboardInterrupt):
                train(Workspace(tmp_path / name, reporter=report), **arguments)
        torch.rand(3)  # the caller's random state must not matter
        epochs: list[float] = []
        workspace = Workspace(tmp_path / name, reporter=lambda done, *_, e=epochs: e.append(done))
        results.append(train(workspace, **arguments))
        assert epochs == ([5, 6] if stop else [1, 2, 3, 4, 5, 6])  # a checkpoint after the fourth
        weights.append(workspace.load("weights"))
    assert results[0] == results[1]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])


def test_what_is_learned_and_saved(tmp_path: Path) -> None:
    settings = TrainingSettings(batch_size=32, max_epochs=30, learning_rate=3e-3)
    workspace = Workspace(tmp_path)
    result = train(workspace, setting="five", seed=0, training=settings)
    assert (result["n_train"], result["n_validation"]) == (160, 40)
    assert result["validation_nll"] == min(result["history"]["validation_nll"])  # the best, not the last
    assert result["validation_accuracy"] > 0.6  # chance is 0.2
    model = network(5)
    model.load_state_dict(workspace.load("weights"))
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_seeds_give_different_networks_of_one_split(tmp_path: Path) -> None:
    saved = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        train(Workspace(tmp_path / str(seed)), setting="ten", seed=seed, training=TINY)
        saved.append(Workspace(tmp_path / str(seed)).load("weights"))
    assert not torch.equal(saved[0]["0.weight"], saved[1]["0.weight"])
