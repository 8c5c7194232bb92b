"""What example inputs may be, and what is said of those that do not fit the model."""

from __future__ import annotations

import collections
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import momentprop as mp
from small import mlp

X = torch.linspace(-1, 1, 8).view(2, 4)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return self.layers(x if scale is None else x * scale)


@pytest.mark.parametrize("kind", [dict, collections.UserDict, collections.OrderedDict])
def test_a_mapping_means_keywords(kind: Any) -> None:
    model, given = Named(), kind({"scale": torch.ones(2, 1), "x": X})
    expected = mp.convert(model, ((), {"x": X, "scale": torch.ones(2, 1)}))(x=X, scale=torch.ones(2, 1))
    torch.testing.assert_close(mp.convert(model, given)(**given).std, expected.std)
    mc = mp.monte_carlo(model, given, n_samples=20)
    assert mc.mean.shape == (2, 3)


@pytest.mark.parametrize(
    "data",
    [list(X), [(row, 1) for row in X], [{"x": row, "labels": 1} for row in X]],
    ids=["inputs", "pairs", "dictionaries with labels"],
)
def test_a_loader_means_the_inputs_of_its_first_batch(data: Any) -> None:
    model = Named()
    loader: Any = DataLoader(data, batch_size=2)
    torch.testing.assert_close(mp.convert(model, loader)(x=X).std, mp.convert(model, X)(X).std)
    assert mp.monte_carlo(model, loader, n_samples=20).mean.shape == (2, 3)


def test_an_empty_loader() -> None:
    with pytest.raises(mp.InputError, match="the loader is empty"):
        mp.convert(mlp(), DataLoader([]))


class TestMismatches:
    def test_of_types(self) -> None:
        for convert in (mp.convert, mp.monte_carlo):
            with pytest.raises(mp.InputError, match=r"float32.*weights are torch\.float64; .*\.to"):
                convert(mlp().double(), X)

    def test_of_devices(self) -> None:
        with pytest.raises(mp.InputError, match=r"on meta.*weights are on cpu"):
            mp.convert(mlp(), X.to("meta"))
        with pytest.raises(mp.InputError, match=r"on meta.*weights are on cpu"):
            mp.convert(mlp(), X)(X.to("meta"))

    def test_models_that_cast_run(self) -> None:
        class Casts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = mlp().double()

            def forward(self, x: Tensor) -> Tensor:
                return self.layers(x.double())

        assert mp.convert(Casts(), X)(X).std.dtype == torch.float64

    def test_a_model_moved_after_its_conversion(self) -> None:
        model = mlp()
        network = mp.convert(model, X)
        model.double()
        with pytest.raises(
            mp.ChangedError, match=r"0\.weight is torch\.float64 on cpu, and was torch\.float32"
        ):
            network(X.double())
        network = mp.convert(model, X.double())
        model.to("meta")
        with pytest.raises(mp.ChangedError):
            network(X.double())


def test_a_converted_network_is_not_converted_again() -> None:
    network = mp.convert(mlp(), X)
    with pytest.raises(TypeError, match="converted already"):
        mp.convert(network, X)


def test_a_wrong_shape_takes_three_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(mp.TraceError) as error:
        mp.convert(mlp(), torch.zeros(2, 9))
    text = str(error.value)
    assert len(text.splitlines()) <= 3
    assert "2x9" in text
    shown = "".join(traceback.format_exception(error.value))
    assert "direct cause" not in shown
    assert "During handling" not in shown
    assert capfd.readouterr().err == ""
