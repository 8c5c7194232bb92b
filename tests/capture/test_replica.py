"""A replica holds the same tensors in modules of its own, and refers to nothing of the model's."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict, namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import momentprop as mp
from momentprop.capture.arming import armed
from momentprop.capture.replica import replica
from momentprop.capture.trace import trace
from small import assert_untouched, cnn, snapshot


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = cnn(), nn.BatchNorm1d(3)


def test_tensors_are_the_same_and_modules_are_not() -> None:
    model = Own()
    model.norm.bias = model.norm.weight  # tied
    model.again = model.net[0]
    twin = replica(model)
    assert type(twin) is Own
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert [name for name, _ in twin.named_modules(remove_duplicate=False)] == names
    assert not {*model.modules()} & {*twin.modules()}
    assert twin.again is twin.net[0]
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert twin.state_dict(keep_vars=True)[name] is tensor
    assert list(dict(model.named_parameters())) == list(dict(twin.named_parameters()))


def test_what_is_done_to_it_is_not_done_to_the_model() -> None:
    model = Own()
    model.plain, model.items, model.table = torch.zeros(2), [torch.zeros(2)], {"a": 1}
    before, weight = snapshot(model), model.net[0].weight
    twin = replica(model, copy_tensors=True)
    assert twin.net[0].weight is weight  # parameters are large: they are not copied
    twin.norm.running_mean.add_(1)
    twin.plain.add_(1)
    twin.items[0].add_(1)
    twin.items.append(twin.plain)
    twin.table["b"] = twin.plain
    twin.extra = 1
    twin.register_buffer("new", torch.zeros(1))
    twin.net.add_module("more", nn.ReLU())
    twin.net[0].register_forward_hook(lambda *_: None)
    del twin.norm
    assert_untouched(model, before)
    assert not model.plain.any()
    assert [tensor.tolist() for tensor in model.items] == [[0, 0]]
    assert model.table == {"a": 1}
    assert not hasattr(model, "extra")


def test_shared_buffers_stay_shared() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(2))
    model.register_buffer("b", model.a)
    twin = replica(model, copy_tensors=True)
    twin.a.add_(1)
    assert twin.b is twin.a
    assert not model.a.any()


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


Pair = namedtuple("Pair", "first second")


def test_what_refers_to_a_module_refers_to_its_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    layer, off_tree = model[0], nn.Linear(2, 2)
    count = 0

    def recursive(n: int) -> nn.Module:
        nonlocal count
        count += 1
        return layer if n == 0 else recursive(n - 1)

    vars(model[1]).update(
        parent=model,
        listed=[layer, off_tree],
        pair=Pair(layer, 1),
        ordered=OrderedDict(a={"b": layer}),
        method=layer.forward,
        partial=functools.partial(nn.Module.get_parameter, layer),
        closure=recursive,
        default=lambda x, own=layer: own,
        weak=weakref.ref(model),
        helper=Helper(layer),
    )
    twin = replica(model)
    held, copy = vars(twin[1]), twin[0]
    assert held["parent"] is twin
    assert held["listed"][0] is copy
    assert held["listed"][1] not in (off_tree, copy)
    assert held["pair"] == Pair(copy, 1)
    assert held["ordered"]["a"]["b"] is copy
    assert held["method"].__self__ is copy
    assert held["partial"].args == (copy,)
    assert held["closure"](3) is copy
    assert count == 0
    assert held["default"](0) is copy
    assert held["weak"]() is twin
    assert held["helper"].module is copy
    assert model[1].helper.module is layer


def test_locks_files_and_generators_are_shared(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (tmp_path / "open").open("w") as file:
        held = {
            "lock": threading.Lock(),
            "numbers": (i for i in range(3)),
            "file": file,
            "module": types,
            "size": torch.Size([1]),
            "function": cnn,
            "generator": torch.Generator(),
        }
        vars(model).update(held)
        twin = vars(replica(model))
        assert all(twin[name] is value for name, value in held.items())


def test_hooks_run_and_append_to_lists_of_the_replica() -> None:
    class Listens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen, self.calls = nn.Linear(4, 3), [], 0
            self.layer.register_forward_hook(self.listen)
            self.layer.register_forward_pre_hook(lambda module, args: self.seen.append(module))

        def listen(self, module: nn.Module, args: object, out: Tensor) -> Tensor:
            self.calls += 1
            return out * 2

        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(self.layer(x), 0.5, self.training)

    model, x = Listens().eval(), torch.randn(2, 4)
    torch.testing.assert_close(mp.convert(model, x)(x).mean, model.layer(x))
    assert model.calls == 1
    assert model.seen == [model.layer]


def test_a_forward_of_the_instance() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval(), torch.randn(2, 4)
    before = model.forward
    model.forward = lambda x: before(x) * 2
    assert armed(model)(x).ne(model(x)).any()  # its dropout is that of the replica
    torch.testing.assert_close(mp.convert(model, x)(x).mean, model(x))


def _parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(0.5))


def _spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Dropout(0.5))


def _old_spectral() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Dropout(0.5))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def _recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1]

    return Last()


def _normalised() -> nn.Module:
    class Counts(nn.Module):
        """Statistics of its own, and a counter."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count += 1
                self.average.lerp_(x.mean(0), 0.1)
            return torch.dropout(self.norm(x), 0.5, self.training)

    return Counts()


@pytest.mark.parametrize(
    "make",
    [_parametrized, _spectral, _old_spectral, _tied, _recurrent, _normalised],
    ids=lambda make: make.__name__,
)
def test_models_convert_and_stay_as_they_are(make: object) -> None:
    model, x = make(), torch.randn(3, 4)
    model(x)
    model.eval()
    before = snapshot(model)
    state = trace(model, x).state
    assert {*state} <= {*model.state_dict()}
    assert mp.convert(model, x, fidelity="fast", unsupported="linearize")(x).shape == x.shape
    assert_untouched(model, before)
