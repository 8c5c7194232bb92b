"""Converting leaves no trace in other threads: not in their models, generators, warnings or errors."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import trace
from small import cnn, mlp


@contextlib.contextmanager
def meanwhile(step: Callable[[], object]) -> Iterator[None]:
    """Repeats the step in another thread, at least once, and raises what it raised."""
    stop, first, raised = threading.Event(), threading.Event(), []

    def repeat() -> None:
        try:
            while not stop.is_set():
                step()
                first.set()
        except BaseException as error:
            raised.append(error)
        finally:
            first.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # many turns while the other thread converts
    thread = threading.Thread(target=repeat)
    thread.start()
    first.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True, scope="module")
def imported():
    """The first conversion imports a good part of torch: seconds, and more beside another thread."""
    trace(mlp(), torch.randn(2, 4))


class Shares(nn.Module):
    """One layer at two places, and dropout that a flag switches: a model easily mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(self.first, nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.inner(self.first(x))), 0.5, self.training)


class Flips(nn.Module):
    """A branch that Python's generator decides, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return -x if self.training and random.random() < self.layerdrop else x


class Randomly(nn.Module):
    """Draws in eval mode too, which is found out by running it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True)


MODELS = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (3, 8, 8)),
    "shared": (Shares, (4,)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_serves_answers_the_same(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(2, *shape)
    modules, kept = list(model.modules()), [vars(m) for m in model.modules()]
    with torch.no_grad():
        answer = model(x)

    def serve() -> None:
        with torch.no_grad():
            assert torch.equal(model(x), answer)
        assert not any(module.training for module in modules)
        assert all(vars(m) is own for m, own in zip(modules, kept, strict=True))

    with meanwhile(serve):
        for _ in range(3):
            mp.convert(model, x, fidelity="fast")


def test_a_model_of_another_kind_serves_too() -> None:
    """What traces one model must not follow the calls of another."""
    other, x = Shares().eval(), torch.randn(3, 4)
    answer = other(x)

    def serve() -> None:
        assert torch.equal(other(x), answer)
        assert type(other.first) is nn.Linear

    with meanwhile(serve):
        for _ in range(3):
            mp.convert(Shares(), x, fidelity="fast")


def test_a_compiled_model_serves_too() -> None:
    model, x = mlp().eval(), torch.randn(3, 4)
    compiled = torch.compile(mlp().eval(), backend="eager")
    answer = compiled(x)

    def serve() -> None:
        assert torch.equal(compiled(x), answer)

    with meanwhile(serve):
        for _ in range(3):
            mp.convert(model, x, fidelity="fast")
    assert not vars(x)  # attributes would have the next call compiled anew


def test_printed_tensors_and_built_in_functions() -> None:
    """Tensors are printed without modes, and those of the thread that traces stay in force."""
    x = torch.randn(3)

    def look() -> None:
        assert repr(x).startswith("tensor")
        assert type(math.pow(2, 3)) is float
        assert not torch.compiler.is_exporting()
        assert torch.backends.mkldnn.enabled == mkldnn

    mkldnn = torch.backends.mkldnn.enabled
    with meanwhile(look):
        for _ in range(3):
            mp.convert(cnn(), torch.randn(2, 3, 8, 8), fidelity="fast")


def test_two_threads_convert_at_once() -> None:
    made: dict[str, object] = {}
    models = {name: make().eval() for name, (make, _) in MODELS.items()}
    examples = {name: torch.randn(2, *shape) for name, (_, shape) in MODELS.items()}
    filters = list(warnings.filters)

    def convert(name: str, key: str) -> None:
        try:
            made[key] = mp.convert(models[name], examples[name], fidelity="fast")(examples[name])
        except BaseException as error:
            made[key] = error

    threads = [threading.Thread(target=convert, args=(n, f"{n} {i}")) for n in MODELS for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, model in models.items():
        alone = mp.convert(model, examples[name], fidelity="fast")(examples[name])
        for i in range(2):
            found = made[f"{name} {i}"]
            assert isinstance(found, mp.Moments), found
            assert torch.equal(found.mean, alone.mean)
            assert torch.equal(found.variance, alone.variance)
    assert warnings.filters == filters


@pytest.mark.parametrize("model", [mlp(), Flips(), Randomly()], ids=["mlp", "branch", "random"])
def test_generators_of_other_threads_go_on(model: nn.Module) -> None:
    x = torch.randn(2, 4)
    functions = random.random, random.uniform, np.random.rand, np.random.uniform, torch.rand
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    python, numpy = random.Random(0), np.random.RandomState(0)
    own = torch.Generator().manual_seed(0)

    def draw() -> None:
        now = random.random, random.uniform, np.random.rand, np.random.uniform, torch.rand
        assert now == functions
        if not isinstance(model, Flips):  # of whose own numbers nobody else knows
            assert random.random() == python.random()
            assert np.random.rand() == numpy.rand()
        assert torch.equal(torch.rand(3), torch.rand(3, generator=own))

    with meanwhile(draw):
        for _ in range(3):
            with contextlib.suppress(mp.TraceError):
                trace(model, x)


def test_a_branch_is_none_where_another_thread_draws() -> None:
    with meanwhile(random.random), meanwhile(np.random.rand):
        trace(mlp(), torch.randn(2, 4))


def test_switches_of_torch_stay() -> None:
    detect = nn.modules.transformer._detect_is_causal_mask
    streams = sys.stderr, sys.stdout

    def look() -> None:
        assert torch.backends.mha.get_fastpath_enabled()
        assert nn.modules.transformer._detect_is_causal_mask is detect
        assert (sys.stderr, sys.stdout) == streams
        assert torch.is_grad_enabled()

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    with meanwhile(look):
        mp.convert(model, torch.randn(2, 3, 8), fidelity="fast")


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("the model's own", UserWarning, stacklevel=1)
        return F.dropout(x, 0.5, self.training)


def test_other_threads_are_warned_and_log() -> None:
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def look() -> None:
        with pytest.raises(UserWarning, match="seen"):
            warnings.warn("seen", UserWarning, stacklevel=1)
        record = logger.makeRecord(logger.name, logging.WARNING, "file", 1, "seen", (), None)
        assert logger.filter(record)
        assert not logger.disabled

    filters = list(warnings.filters)
    with meanwhile(look):
        for _ in range(3):
            trace(Warns(), torch.randn(2, 4))
    assert warnings.filters == filters
    assert not logger.filters
