"""bnn.freeze(), compilation with any batch size, calls from several threads, memory over many calls."""

from __future__ import annotations

import functools
import gc
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import momentprop as mp
from momentprop.errors import MomentpropError
from momentprop.gaussian.composites import RELU_MOMENTS
from momentprop.lowering.frozen import FrozenNetwork
from momentprop.lowering.inductor import OPTIONS
from momentprop.rules.max_pooling import RECTIFIED_MAXIMA, TILED_MAXIMA
from small import cnn, mlp

TIERS = pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
SHAPES = {mlp: (4,), cnn: (3, 8, 8)}


@functools.cache
def converted(build, tier: str) -> tuple[mp.BayesianNetwork, FrozenNetwork]:
    """A network of one tier and its frozen form, which no test changes."""
    with torch.random.fork_rng(devices=[]):  # whichever test comes first, all draw the same numbers
        bnn = mp.convert(build().eval(), torch.zeros(1, *SHAPES[build]), tier)
        return bnn, bnn.freeze()


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)
    torch.testing.assert_close(found.covariance, expected.covariance)


@TIERS
@pytest.mark.parametrize("build", SHAPES, ids=["dense", "convolutional"])
def test_frozen_gives_the_same_for_any_batch(tier, build):
    bnn, frozen = converted(build, tier)
    assert frozen.fidelity == tier
    for batch in (1, 2, 97, 5):
        x = torch.randn(batch, *SHAPES[build])
        assert_same(frozen(x), bnn(x))


@TIERS
def test_nothing_is_computed_from_weights_alone(tier):
    _, frozen = converted(cnn, tier)
    constant: set[torch.fx.Node] = set()
    for node in frozen.program.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            constant.add(node)
        assert node.op != "call_function" or not inputs or any(n not in constant for n in inputs), node


def test_training_is_not_seen():
    model = mlp().eval()
    bnn = mp.convert(model, torch.zeros(1, 4), "accurate")
    frozen, x = bnn.freeze(), torch.randn(3, 4)
    before = frozen(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert_same(frozen(x), before)
    assert not torch.allclose(bnn(x).mean, before.mean)


@TIERS
def test_uncertain_inputs(tier):
    x = torch.randn(3, 4)
    uncertain = mp.Moments(x, 0.1)
    bnn = mp.convert(mlp().eval(), uncertain, tier)
    frozen = bnn.freeze()
    assert_same(frozen(uncertain), bnn(uncertain))
    assert_same(frozen(x), bnn(mp.Moments(x, 0.0)))
    with pytest.raises(MomentpropError, match="not uncertain when the network was frozen"):
        mp.convert(mlp().eval(), x, tier).freeze()(uncertain)


def test_structured_outputs_and_logits():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            out = self.body(x)
            return {"probabilities": out.softmax(-1), "logits": out, "input": x}

    bnn = mp.convert(Two().eval(), torch.zeros(1, 4), "accurate")
    x = torch.randn(3, 4)
    found, expected = bnn.freeze()(x), bnn(x)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same(found[name], expected[name])
    assert_same(found["probabilities"].logits.moments, expected["probabilities"].logits.moments)


@TIERS
def test_outputs_that_follow_from_the_batch(tier):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x), x.shape[0], x.shape[0] / 2, "constant"

    bnn = mp.convert(Counting().eval(), torch.zeros(2, 4), tier)
    frozen = bnn.freeze()
    for batch in (1, 3, 97):
        x = torch.randn(batch, 4)
        found, expected = frozen(x), bnn(x)
        assert_same(found[0], expected[0])
        assert found[1:] == expected[1:] == (batch, batch / 2, "constant")


class Tokens(nn.Module):
    """Indices, a mask by keyword, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(11, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, tokens, *, keep, bias=None, scale=1.0):
        x = self.dropout(self.embed(tokens)).masked_fill(~keep.unsqueeze(-1), 0.0)
        out = self.head(x.mean(1)) * scale
        return out if bias is None else out + bias


@TIERS
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_indices_masks_and_keywords(tier, with_bias):
    def inputs(batch):
        keep = torch.arange(5) < 1 + torch.arange(batch).unsqueeze(1) % 5
        more = {"bias": torch.randn(batch, 3)} if with_bias else {}
        return torch.randint(11, (batch, 5)), {"keep": keep, "scale": 2.0, **more}

    tokens, keywords = inputs(3)
    bnn = mp.convert(Tokens().eval(), ((tokens,), keywords), tier)
    frozen = bnn.freeze()
    for batch in (1, 4, 97):
        tokens, keywords = inputs(batch)
        assert_same(frozen(tokens, **keywords), bnn(tokens, **keywords))


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    bnn = mp.convert(mlp().eval(), mp.Moments(torch.zeros(2, 4), 0.1), "fast")
    before = torch.get_rng_state()
    bnn.freeze()
    mp.save(bnn, tmp_path / "model.pt2")
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_exported_is_an_error_of_ours(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("a constraint is violated")

    bnn = mp.convert(mlp().eval(), torch.zeros(2, 4), "fast")
    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(mp.ExportError, match=r"torch.export does not accept.*a constraint is violated"):
        bnn.freeze()


def test_a_frozen_network_is_not_moved():
    frozen = mp.convert(mlp().eval(), torch.zeros(1, 4), "fast").freeze()
    assert frozen.to(torch.float32) is frozen
    with pytest.raises(MomentpropError, match="freeze"):
        frozen.double()


class Counter:
    """A compiler that counts what it is given to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.graphs += 1
        return graph.forward


@TIERS
@pytest.mark.parametrize("freeze", [False, True], ids=["converted", "frozen"])
def test_two_compilations_serve_all_batch_sizes(tier, freeze):
    """One for a batch of one, which torch takes for a constant, and one for all others."""
    counter = Counter()
    compiled = torch.compile(converted(mlp, tier)[freeze], backend=counter, fullgraph=True)
    for batch in (1, 2, 5, 32, 256):
        compiled(torch.randn(batch, 4))
    assert counter.graphs <= 2


@TIERS
def test_convolutions_are_compiled_as_often_as_in_the_plain_network(tier):
    """torch itself tells batches of 16 and more from smaller ones where there are convolutions.

    The sweep back has K rows per sample in its convolutions, so there it tells K times the batch apart too.
    """
    layers = [nn.Conv2d(1, 2, 3), nn.Dropout(0.2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 2)).eval()
    counts = []
    for network in (model, mp.convert(model, torch.zeros(1, 1, 6, 6), tier)):
        torch.compiler.reset()
        counter = Counter()
        compiled = torch.compile(network, backend=counter, fullgraph=True)
        for batch in (1, 2, 5, 32, 256):
            compiled(torch.randn(batch, 1, 6, 6))
        counts.append(counter.graphs)
    plain, converted = counts
    assert plain > 2
    assert converted <= plain + (tier == "accurate")


@TIERS
def test_compile_in_place(tier):
    bnn = mp.convert(mlp().eval(), torch.zeros(1, 4), tier)
    x = torch.randn(5, 4)
    expected = bnn(x)
    bnn.compile(backend="aot_eager", fullgraph=True)
    assert_same(bnn(x), expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"options": OPTIONS}),
        ({"options": {"cpp.threads": 1}}, {"options": {**OPTIONS, "cpp.threads": 1}}),
        ({"options": dict.fromkeys(OPTIONS, "off")}, {"options": dict.fromkeys(OPTIONS, "off")}),
        ({"mode": "reduce-overhead"}, {"mode": "reduce-overhead"}),
        ({"backend": "eager", "fullgraph": True}, {"backend": "eager", "fullgraph": True}),
    ],
)
def test_options_of_the_compiler(monkeypatch, given, expected):
    """Ours where the user names none, and only for the compiler that knows them."""
    bnn = mp.convert(mlp().eval(), torch.zeros(1, 4))
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options))
    bnn.compile(**given)
    bnn.freeze().compile(**given)
    assert calls == [expected] * 2


@TIERS
def test_threads_may_share_a_network(tier):
    for network in converted(cnn, tier):
        inputs = [torch.randn(1 + i % 3, 3, 8, 8) for i in range(16)]
        expected = [network(x) for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            for found, one in zip(pool.map(network, inputs), expected, strict=True):
                assert_same(found, one)


@TIERS
def test_memory_does_not_grow(tier):
    """A leak of one small tensor per call would show; benchmarks/memory.py makes 10,000 calls."""
    bnn, _ = converted(mlp, tier)
    x = torch.randn(2, 4)

    def calls(count: int) -> tuple[int, int]:
        with torch.no_grad():
            for _ in range(count):
                bnn(x)
        gc.collect()
        alive = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    tensors, peak = calls(50)
    more_tensors, more_peak = calls(500)
    assert more_tensors <= tensors
    assert more_peak - peak < 2048  # KiB


def operators_of(frozen: nn.Module) -> list[object]:
    return [node.target for node in frozen.program.graph.nodes if node.op == "call_function"]


def test_relu_and_max_pooling_are_one_operator_of_the_papers_tier():
    """What ReLU gives is then not written out; the numbers are the same."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(5, 3, 9, 9)
    bnn = mp.convert(model, x, "paper")
    frozen = bnn.freeze()
    assert RECTIFIED_MAXIMA in operators_of(frozen)
    assert RELU_MOMENTS not in operators_of(frozen)
    assert_same(frozen(x), bnn(x))


def test_relu_that_others_read_too_stays():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = nn.functional.dropout(self.conv(x), 0.3, training=True).relu()
            return nn.functional.max_pool2d(y, 2), y.mean((2, 3))

    x = torch.randn(5, 3, 9, 9)
    bnn = mp.convert(Both().eval(), x, "paper")
    frozen = bnn.freeze()
    assert TILED_MAXIMA in operators_of(frozen)
    for found, expected in zip(frozen(x), bnn(x), strict=True):
        assert_same(found, expected)
