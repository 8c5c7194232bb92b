"""Where the backward sweep stops: the frontier, and the covariance that is left, against autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop import tiers
from momentprop.capture.trace import trace
from momentprop.engine.cut import Cut
from momentprop.engine.jump import Jump
from momentprop.moments import Moments
from momentprop.network import Inside, inside
from momentprop.tiers import Request

pytestmark = pytest.mark.usefixtures("one_thread")


def with_cut(model: nn.Module, x: Any, cut: Cut | None) -> mp.BayesianNetwork:
    """Tier accurate with another cut; None sweeps nothing at all."""
    tier = dataclasses.replace(tiers.ACCURATE, cut=cut)
    return mp.BayesianNetwork(model, trace(model, x), Request(tier), (isinstance(x, Moments),))


def frontier(network: mp.BayesianNetwork) -> list[str]:
    return [step.name for step in inside(network).built.program.plan.steps if step.at_frontier]


def swept(network: mp.BayesianNetwork) -> list[str]:
    return [step.name for step in inside(network).built.program.plan.steps if step.swept]


def forward_moments(network: mp.BayesianNetwork, x: Any) -> dict[str, Moments]:
    """Of every random value, by the forward sweep."""
    made: Inside = inside(network)
    found: dict[str, Any] = {}
    made.built.program.run([*made.state, x], found.__setitem__)
    return found


def carried(behind: Callable[..., Tensor], *sources: Moments) -> Tensor:
    """The sum of J diag(V) J^T over sources, sample by sample, with J of a function behind them."""
    found: list[Any] = []
    means = tuple(source.mean for source in sources)
    for i in range(len(means[0])):
        one = tuple(m[i : i + 1] for m in means)
        rows = torch.autograd.functional.jacobian(lambda *v: behind(*v).flatten(), one)
        jacobians = [row.flatten(1) for row in rows]
        found.append(sum(j * s.variance[i].flatten() @ j.T for j, s in zip(jacobians, sources, strict=True)))
    return torch.stack(found)


class Residual(nn.Module):
    """x + f(x), twice, with a layer in front and one behind; linear behind the dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(4, 5), nn.Linear(5, 5)
        self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(F.dropout(x, 0.3, self.training)))
        h = h + self.inner(h)
        return self.last(h + self.second(h))


class Joined(nn.Module):
    """Two branches of one value, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.last = nn.Linear(5, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(F.dropout(x, 0.3, self.training)))
        return self.last(torch.cat([self.left(h), self.right(h)], 1))


class Shared(nn.Module):
    """One layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(F.dropout(x, 0.3, self.training)))
        return self.last(self.again(self.again(self.again(h))))


def example(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64)


@pytest.mark.parametrize("make", [Residual, Joined, Shared])
def test_everything_is_tier_accurate(make: type[nn.Module]) -> None:
    model, x = make(), example()
    out, expected = with_cut(model, x, Cut.everything())(x), mp.convert(model, x, "accurate")(x)
    assert torch.equal(out.mean, expected.mean)
    assert torch.equal(out.covariance, expected.covariance)
    assert frontier(with_cut(model, x, Cut.everything())) == []


@pytest.mark.parametrize("make", [Residual, Joined, Shared])
def test_outputs_alone_have_the_forward_variances(make: type[nn.Module]) -> None:
    model, x = make(), example()
    bnn = with_cut(model, x, Cut.outputs())
    out, forward = bnn(x), with_cut(model, x, None)(x)
    assert swept(bnn) == []
    assert torch.equal(out.mean, forward.mean)
    torch.testing.assert_close(out.covariance, torch.diag_embed(forward.variance))
    assert frontier(bnn) == [str(list(inside(bnn).graph.graph.nodes)[-1].args[0][0])]


CUTS = {
    # inside a block the shortcut crosses the frontier too
    "residual, behind the layer in a block": (
        Residual,
        Cut.behind("inner"),
        ["relu", "linear_1"],
        lambda m, h, y: m.last((h + y) + m.second(h + y)),
    ),
    "residual, after that layer's node": (
        Residual,
        Cut.after("linear_1"),
        ["relu", "linear_1"],
        lambda m, h, y: m.last((h + y) + m.second(h + y)),
    ),
    "residual, between blocks": (Residual, Cut.after("add"), ["add"], lambda m, h: m.last(h + m.second(h))),
    "concatenation, one branch": (
        Joined,
        Cut.behind("left"),
        ["linear_1", "linear_2"],
        lambda m, a, b: m.last(torch.cat([a, b], 1)),
    ),
    "concatenation, both branches": (
        Joined,
        Cut.behind("left", "right"),
        ["linear_1", "linear_2"],
        lambda m, a, b: m.last(torch.cat([a, b], 1)),
    ),
    "concatenation, in front of the branches": (
        Joined,
        Cut.after("relu"),
        ["relu"],
        lambda m, h: m.last(torch.cat([m.left(h), m.right(h)], 1)),
    ),
    "shared weights, between uses": (
        Shared,
        Cut.after("linear_2"),
        ["linear_2"],
        lambda m, h: m.last(m.again(h)),
    ),
    # every use is inside: what the module gives is what something else takes of it
    "shared weights, behind all uses": (
        Shared,
        Cut.behind("again"),
        ["linear_3"],
        lambda m, h: m.last(h),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_covariance_of_independent_sources_at_the_frontier(name: str) -> None:
    make, cut, expected, behind = CUTS[name]
    model, x = make(), example()
    bnn = with_cut(model, x, cut)
    assert frontier(bnn) == expected
    forward = forward_moments(bnn, x)
    out = bnn(x)
    covariance = carried(lambda *v: behind(model, *v), *[forward[node] for node in expected])
    torch.testing.assert_close(out.covariance, covariance)
    torch.testing.assert_close(out.variance, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(out.mean, with_cut(model, x, None)(x).mean)


def test_noise_behind_the_cut_is_swept_with_what_crosses_it() -> None:
    """A dropout inside the region is a source of its own; the one in front is not visited."""
    first, second = nn.Linear(4, 5), nn.Linear(5, 3)
    model = nn.Sequential(nn.Dropout(0.3), first, nn.Dropout(0.2), second).double().eval()
    x = example()
    bnn = with_cut(model, x, Cut.behind("1"))
    assert frontier(bnn) == ["linear"]
    hidden = forward_moments(bnn, x)["linear"]
    own = Moments(hidden.mean, 0.25 * (hidden.mean**2 + hidden.variance))  # p / (1-p) E[x^2]
    expected = carried(second, hidden) + carried(second, own)
    torch.testing.assert_close(bnn(x).covariance, expected)
    assert not torch.allclose(expected, mp.convert(model, x, "accurate")(x).covariance)


def test_an_uncertain_input_outside_is_no_source_and_inside_is() -> None:
    layers = nn.Linear(4, 5), nn.Linear(5, 3)
    model, x = nn.Sequential(*layers).double().eval(), Moments(example(), 0.5)
    bnn = with_cut(model, x, Cut.behind("0"))
    assert frontier(bnn) == ["linear"]
    torch.testing.assert_close(bnn(x).covariance, carried(layers[1], forward_moments(bnn, x)["linear"]))
    whole = with_cut(model, x, Cut.everything())(x)
    torch.testing.assert_close(whole.covariance, carried(model, x))


def kinds(network: mp.BayesianNetwork) -> set[type]:
    return {type(step.operator) for step in inside(network).built.program.plan.steps}


def test_operators_are_not_fused_across_the_frontier() -> None:
    """Dropout, layer and activation are one operator only where all three are swept."""
    model = nn.Sequential(nn.Dropout(0.05), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    x = example()
    assert Jump in kinds(with_cut(model, x, Cut.everything()))
    for cut in (Cut.behind("0"), Cut.behind("1")):
        bnn = with_cut(model, x, cut)
        assert Jump not in kinds(bnn)
        assert len(frontier(bnn)) == 1
        assert bnn(x).covariance.shape == (3, 3, 3)


@pytest.mark.parametrize("cut", [Cut.outputs(), Cut.behind("1")], ids=["outputs", "behind the logits"])
def test_a_softmax_whose_logits_lie_before_the_cut(cut: Cut) -> None:
    """Logits have the variances of the forward sweep; the probabilities' covariance is that of those."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3), nn.Softmax(-1)).double().eval()
    x = example()
    out, forward = with_cut(model, x, cut)(x), with_cut(model, x, None)(x)
    torch.testing.assert_close(out.mean, forward.mean, rtol=0, atol=1e-3)  # other points of the same integral
    logits = out.logits.moments
    torch.testing.assert_close(logits.covariance, torch.diag_embed(logits.variance))
    torch.testing.assert_close(logits.variance, (model[1].weight ** 2 @ (x**2 * 0.3 / 0.7).T).T)
    assert torch.equal(out.covariance, out.covariance.mT)
    assert (torch.linalg.eigvalsh(out.covariance) > -1e-12).all()


def test_compiles_and_exports() -> None:
    model, x = Residual(), example()
    bnn = with_cut(model, x, Cut.behind("inner"))
    with torch.no_grad():
        found = torch.compile(bnn, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found.covariance, bnn(x).covariance)
    torch.testing.assert_close(bnn.freeze()(x).covariance, bnn(x).covariance)


class Halves(nn.Module):
    """The halves of a hidden layer, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.first, self.last = nn.Dropout(0.3), nn.Linear(4, 6), nn.Linear(3, 2)

    def behind(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(a + 2 * b)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(*self.first(self.drop(x)).chunk(2, -1))


def test_parts_of_a_list_outside_are_sources_of_their_own() -> None:
    model, x = Halves().double().eval(), example()
    whole = inside(with_cut(model, x, Cut.everything())).graph.graph
    (chunk,) = [n.name for n in whole.nodes if n.target is torch.ops.aten.chunk.default]
    bnn = with_cut(model, x, Cut.after(chunk))
    hidden = forward_moments(bnn, x)[chunk]
    torch.testing.assert_close(bnn(x).covariance, carried(model.behind, *hidden))
