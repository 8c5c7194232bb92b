"""The converted network as a module: batches, gradients, compilation, and answers that never change."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

import momentprop as mp
from enumeration import enumerate_masks
from exact import Model, assert_is_a_covariance, uncertain
from momentprop.moments import Moments
from networks import Apply
from small import mlp

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")
TIERS = pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])


def one_output() -> nn.Sequential:
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(10, 1))


def jumps() -> nn.Sequential:
    """A small drop probability in front of a small layer, whose response is used instead of a gain."""
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def images() -> nn.Sequential:
    layers = [nn.Dropout2d(0.2), nn.Conv2d(2, 3, 3, padding="same"), nn.BatchNorm2d(3)]
    layers += [nn.ReLU(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Dropout(0.4), nn.Linear(24, 5)]
    return nn.Sequential(*layers)


def sequences() -> nn.Module:
    """Time first inside."""
    return Model(
        lambda m, x: m.b(m.drop(m.a(x).transpose(0, 1).relu())).sum(0), a=nn.Linear(2, 3), b=nn.Linear(3, 2)
    ).float()


NETWORKS = {
    "K = 3": (mlp, (4,)),
    "K = 1": (one_output, (4,)),
    "jumps": (jumps, (2,)),
    "images": (images, (2, 4, 4)),
    "sequences": (sequences, (5, 2)),
}


@functools.cache
def _converted(name: str) -> tuple[nn.Module, mp.BayesianNetwork]:
    make, shape = NETWORKS[name]
    model = make().eval()
    return model, mp.convert(model, torch.zeros(2, *shape), "accurate")


def converted(name: str, batch: int = 3) -> tuple[nn.Module, Tensor, mp.BayesianNetwork]:
    """A network that tests may only read."""
    model, bnn = _converted(name)
    return model, torch.randn(batch, *NETWORKS[name][1]), bnn


@pytest.mark.parametrize("name", NETWORKS)
class TestNetworks:
    def test_is_a_covariance(self, name: str) -> None:
        _, x, bnn = converted(name)
        assert_is_a_covariance(bnn(x), tolerance=1e-5)

    def test_samples_do_not_influence_each_other(self, name: str) -> None:
        """And any batch size runs, none included."""
        _, x, bnn = converted(name, 4)
        whole = bnn(x).covariance
        for i in range(4):
            torch.testing.assert_close(bnn(x[i : i + 1]).covariance, whole[i : i + 1])
        assert bnn(x[:0]).covariance.shape == (0, *whole.shape[1:])

    def test_gradients_reach_every_parameter(self, name: str) -> None:
        """Through the covariance alone, and finite; biases of the last layer have no part in it."""
        model, x, bnn = converted(name)
        x.requires_grad_()
        model.zero_grad()
        bnn(x).covariance.square().sum().backward()
        reached = {n: p.grad for n, p in [*model.named_parameters(), ("x", x)] if p.grad is not None}
        assert all(g.isfinite().all() for g in reached.values())
        without = {n for n, g in reached.items() if not g.any()} | {
            n for n, _ in model.named_parameters() if n not in reached
        }
        assert all(n.endswith("bias") for n in without)
        assert len(without) <= 1

    def test_gradients_are_right(self, name: str) -> None:
        _, x, bnn = converted(name, 2)
        bnn = copy.deepcopy(bnn).double()
        point = x.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda v: bnn(v).covariance, (point,), fast_mode=True)

    def test_double_is_near_single(self, name: str) -> None:
        _, x, bnn = converted(name)
        single = bnn(x).covariance
        double = copy.deepcopy(bnn).double()(x.double()).covariance
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * double.abs().max().item())

    def test_compiles_in_one_piece(self, name: str) -> None:
        """The same numbers, for several batch sizes (none that other dimensions have too)."""
        _, x, bnn = converted(name, 11)
        with torch.no_grad():
            compiled = torch.compile(bnn, fullgraph=True, backend="eager", dynamic=True)
            for batch in (7, 11):
                out, expected = compiled(x[:batch]), bnn(x[:batch])
                torch.testing.assert_close(out.mean, expected.mean)
                torch.testing.assert_close(out.covariance, expected.covariance)
                torch.testing.assert_close(out.variance, expected.variance)

    def test_exports_as_plain_operators(self, name: str) -> None:
        """With a dynamic batch, and nothing of autograd or vmap in the graph."""
        _, x, bnn = converted(name, 3)
        with torch.no_grad():
            program = torch.export.export(bnn, (x,), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
            for module in program.graph_module.modules():
                for node in getattr(module, "graph", program.graph).nodes:
                    assert not isinstance(node.target, HigherOrderOperator), node
                    assert not any(word in str(node.target) for word in ("autograd", "vmap", "grad_")), node
            y = torch.randn(7, *x.shape[1:])
            out, expected = program.module()(y), bnn(y)
        torch.testing.assert_close(out.covariance, expected.covariance)
        torch.testing.assert_close(out.mean, expected.mean)


# raised inside torch's own compiler
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check.*:FutureWarning")
def test_compiled_code_gives_the_same_numbers() -> None:
    """By torch's own compiler, not only in its graphs."""
    bnn = mp.convert(mlp().eval(), torch.zeros(2, 4), "accurate")
    x = torch.randn(5, 4)
    with torch.no_grad():
        compiled = torch.compile(bnn, fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x).covariance, bnn(x).covariance)


# ---- answers do not depend on what happened before


class Two(nn.Module):
    """Layers that are treated otherwise where inputs are uncertain.

    Rare drops are gone through by pairs only of a certain input; and directions are carried through six dense
    layers in a row, of which one is random here only where its input is.
    """

    def __init__(self) -> None:
        super().__init__()
        row = [module for _ in range(5) for module in (nn.Linear(8, 8), nn.ReLU())]
        self.deep = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), *row)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        for layer in row[::2]:
            nn.init.normal_(layer.weight, std=0.5)  # so that noise does not die out on the way

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.first(F.dropout(x, 0.05, self.training)))
        return self.last(h + self.deep(y))


@functools.cache
def two() -> tuple[Two, Moments, Moments]:
    torch.manual_seed(0)
    return Two().eval(), Moments(2 * torch.randn(4, 6), 0.3), Moments(torch.randn(4, 3), 0.2)


PATTERNS = list(itertools.product([False, True], repeat=2))


def given(pattern: tuple[bool, bool]) -> tuple[Any, Any]:
    _, x, y = two()
    return (x if pattern[0] else x.mean), (y if pattern[1] else y.mean)


def tensors(out: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(out, is_leaf=lambda v: isinstance(v, Moments))
    return [t for m in leaves for t in (m.mean, m.variance, m.covariance) if t is not None]


def assert_equal(found: Any, expected: Any) -> None:
    """To the last bit."""
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other)


@TIERS
def test_the_order_of_calls_does_not_matter(tier: str) -> None:
    """Every pattern gives, to the last bit, what a network converted for it gives."""
    model = two()[0]
    alone = {pattern: mp.convert(model, given(pattern), tier)(*given(pattern)) for pattern in PATTERNS}
    bnn = mp.convert(model, given((False, False)), tier)
    for pattern in [*PATTERNS, *reversed(PATTERNS)]:
        assert_equal(bnn(*given(pattern)), alone[pattern])
    for example in PATTERNS[1:]:
        bnn = mp.convert(model, given(example), tier)
        assert_equal(bnn(*given((False, False))), alone[False, False])


@TIERS
def test_neither_freezing_nor_moving_changes_answers(tier: str) -> None:
    """A frozen copy agrees with its network, whatever that was called with before."""
    model = two()[0]
    bnn = mp.convert(model, given((False, False)), tier)
    certain = given((False, False))
    before = bnn(*certain)
    bnn(*given((True, True)))
    frozen = bnn.freeze()
    assert_equal(bnn(*certain), before)
    torch.testing.assert_close(frozen(*certain).mean, before.mean)
    torch.testing.assert_close(frozen(*certain).variance, before.variance)
    torch.testing.assert_close(frozen(*certain).covariance, before.covariance)
    assert_equal(bnn.to(torch.float32)(*certain), before)
    bnn.double().float()
    assert_equal(bnn(*certain), before)
    both = given((True, True))
    assert_equal(bnn(*both), mp.convert(model, both, tier)(*both))


@TIERS
def test_threads_get_what_one_gets(tier: str) -> None:
    """Eight at once, most of them the first to come with their pattern of uncertain inputs."""
    model = two()[0]
    expected = {pattern: mp.convert(model, given(pattern), tier)(*given(pattern)) for pattern in PATTERNS}
    bnn = mp.convert(model, given((False, False)), tier)
    with ThreadPoolExecutor(8) as pool:
        calls = [(pattern, pool.submit(bnn, *given(pattern))) for pattern in PATTERNS * 8]
        for pattern, call in calls:
            assert_equal(call.result(), expected[pattern])


def test_a_network_prints_what_it_is() -> None:
    network = mp.convert(nn.Sequential(mlp(), nn.ReLU(), nn.Dropout(0.1)).eval(), torch.zeros(2, 4), "fast")
    shown = "tier='fast', float32[batch, 4] -> float32[batch, 3], dropout: 1 x p=0.1, 1 x p=0.3"
    assert repr(network) == f"{type(network).__name__}({shown})"
    assert (network.device, network.dtype) == (torch.device("cpu"), torch.float32)


def test_pickled_networks_are_what_archives_give() -> None:
    network, x = mp.convert(mlp().eval(), torch.zeros(2, 4)), torch.randn(3, 4)
    again = pickle.loads(pickle.dumps(network))
    torch.testing.assert_close(again(x).covariance, network(x).covariance)


def test_the_models_configuration_is_the_networks() -> None:
    model = mlp().eval()
    model.config = {"labels": 3}
    assert mp.convert(model, torch.zeros(2, 4)).config is model.config


@TIERS
def test_copies_are_networks_of_their_own(tier: str) -> None:
    model = Two().eval()
    bnn = mp.convert(model, given((False, False)), tier)
    before = bnn(*given((False, False)))
    other = copy.deepcopy(bnn)
    for pattern in PATTERNS:
        assert_equal(other(*given(pattern)), bnn(*given(pattern)))
    with torch.no_grad():
        model.last.bias += 1
        torch.testing.assert_close(bnn(*given((False, False))).mean, before.mean + 1)
        assert_equal(other(*given((False, False))), before)
    double = copy.deepcopy(other).double()
    assert double(*[v.double() for v in given((False, False))]).mean.dtype == torch.float64
    assert_equal(other(*given((False, False))), before)


def test_uncertain_inputs_at_call_time_though_converted_with_certain_ones() -> None:
    """And in any order of calls: every pattern is exact."""
    model = Model(
        lambda m, x, y: m.a(m.drop(x)) - m.b(m.drop(y, 0.2)) * 2 + y[:, :1],
        a=nn.Linear(3, 2),
        b=nn.Linear(2, 2),
    )
    x, y = uncertain(2, 3), uncertain(2, 2)
    certain, both = (mp.convert(model, v, "accurate") for v in ((x.mean, y.mean), (x, y)))
    for first, second in PATTERNS:
        inputs = (x if first else x.mean, y if second else y.mean)
        ((_, covariance),) = enumerate_masks(model, *inputs)
        for bnn in (certain, both):
            torch.testing.assert_close(bnn(*inputs).covariance, covariance)


def test_nothing_is_uncertain_after_all() -> None:
    bnn = mp.convert(nn.Linear(3, 2).double(), uncertain(2, 3), "accurate")
    assert not bnn(torch.randn(2, 3, dtype=torch.float64)).variance.any()


class TestAutoIsTheTierItChooses:
    def test_falling_back_to_fast(self) -> None:
        """With none of the stand-ins that accurate would need, after moving the network either."""
        mp.rule(aten.sin.default, override=True)(lambda x: mp.Moments(x.mean.cos(), x.variance * 0.2))
        repeated = Apply(lambda y: y.repeat(1, 20_000), "repeat")
        layers = [nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1), Apply(torch.sin, "sin"), repeated]
        model, x = nn.Sequential(*layers), torch.randn(5, 4)
        fast = mp.convert(model, x, "fast", unsupported="linearize")(x)
        with pytest.warns(mp.FidelityNote, match="20000 outputs per sample"):
            bnn = mp.convert(model, x, unsupported="linearize")
        assert bnn.fidelity == "fast"
        assert_equal(bnn(x), fast)
        assert_equal(bnn.to(torch.float32)(x), fast)
        assert_equal(bnn.double().float()(x), fast)

    def test_accurate_on_dropped_weights(self) -> None:
        """On its own graph, in which one mask serves all steps."""

        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inputs, self.state, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

            def forward(self, x: Tensor) -> Tensor:
                h = x.new_zeros(x.shape[0], 5)
                weight = F.dropout(self.state.weight, 0.3, self.training)
                for step in x.unbind(1):
                    h = torch.tanh(self.inputs(step) + F.linear(h, weight, self.state.bias))
                return self.last(h)

        model, x = Recurrent().eval(), torch.randn(4, 3, 3)
        bnn = mp.convert(model, x)
        assert bnn.fidelity == "accurate"
        assert_equal(bnn(x), mp.convert(model, x, "accurate")(x))

    def test_jumps_need_a_sweep(self) -> None:
        """Where auto cannot sweep, that is an error which says why, and not an answer without jumps."""
        wide = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 65))
        with pytest.raises(mp.MomentpropError, match=r"jumps= needs tier 'accurate'.*65 outputs per sample"):
            mp.convert(wide, torch.zeros(2, 4), jumps=4)
        mixing = nn.Sequential(nn.Dropout(0.5), nn.Softmax(0))
        with pytest.raises(mp.MomentpropError, match=r"(?s)jumps= needs tier.*samples of the batch"):
            mp.convert(mixing, torch.zeros(2, 4), jumps=4)


@TIERS
class TestCompiled:
    def test_in_one_piece_for_patterns_met_before(self, tier: str) -> None:
        bnn = mp.convert(two()[0], given((False, False)), tier)
        compiled = torch.compile(bnn, fullgraph=True, backend="eager")
        with torch.no_grad():
            for pattern in PATTERNS[::3]:
                expected = bnn(*given(pattern))
                for one, other in zip(tensors(compiled(*given(pattern))), tensors(expected), strict=True):
                    torch.testing.assert_close(one, other)

    def test_a_pattern_first_met_inside(self, tier: str) -> None:
        """Its program is built outside; where all is to be one graph, an error says what to do."""
        bnn = mp.convert(mlp().eval(), torch.zeros(2, 4), tier)
        x = Moments(torch.randn(3, 4), 0.1)
        with torch.no_grad():
            with pytest.raises(Exception, match="call the network once with such inputs"):
                torch.compile(bnn, fullgraph=True, backend="eager")(x)
            found = torch.compile(bnn, backend="eager")(x)
            for one, other in zip(tensors(found), tensors(bnn(x)), strict=True):
                torch.testing.assert_close(one, other)
