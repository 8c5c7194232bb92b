"""momentprop bench: turns, methods in runtimes, rows, JSON and the command."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import momentprop as mp
from benched import subject
from momentprop.cli.app import app
from momentprop_reproduction.benchmarking import run as running
from momentprop_reproduction.benchmarking import turns
from momentprop_reproduction.benchmarking.methods import Method, choose
from momentprop_reproduction.benchmarking.programs import Setting, exported
from momentprop_reproduction.benchmarking.rows import Result, Row
from momentprop_reproduction.benchmarking.run import Plan, run, start
from momentprop_reproduction.benchmarking.runtimes import prepare
from momentprop_reproduction.benchmarking.sampling import sample_with
from momentprop_reproduction.benchmarking.subject import Subject, paper_subject
from momentprop_reproduction.benchmarking.turns import Times, take_turns
from momentprop_reproduction.benchmarking.work import work_of
from small import cnn, mlp

FACTORY = """
import torch
def make():
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
"""


def quiet(*_: object) -> None:
    pass


def small_plan(**options: object) -> Plan:
    known = {"batches": (2,), "threads": (1,), "runtimes": ("eager",), "seconds": 0.01, "memory": False}
    return Plan(tuple(choose(["mc", "fast"], [3])), least_rounds=2, **(known | options))  # type: ignore[arg-type]


def test_turns_alternate_and_their_first_calls_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: a machine may be busy."""
    now, order = [0.0], []

    def takes(name: str, first: float, later: float) -> None:
        is_first = not order or order[-1] != name
        order.append(name)
        now[0] += first if is_first else later

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    functions = {"a": lambda: takes("a", 0.007, 0.002), "b": lambda: takes("b", 0.05, 0.05)}
    found = take_turns(functions, 0.0, least_rounds=3)
    assert max(found["a"].seconds) == pytest.approx(0.002)  # not 0.007, with cold caches
    assert len(found["a"].seconds) >= 3 * 5  # as many as fit into 20 ms
    assert list(found["b"].seconds) == pytest.approx([0.05] * 3)  # a call that is longer than a turn
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert runs == ["a", "b"] * (1 + 3)  # warm-up, then three rounds
    assert len(take_turns(functions, 1.0, least_rounds=3)["b"].seconds) > 10


def test_ratios_are_to_plain_in_the_same_row_of_conditions() -> None:
    row = Row(1, "eager", 8, "fast")
    row.measured(Times((0.4, 0.2, 0.3)), Times((0.1, 0.2, 0.1)))
    assert row.median_ratio == pytest.approx(3)
    assert row.p99_ratio == pytest.approx(2)
    assert row.inputs_per_second == pytest.approx(8 / 0.3)
    alone = Row(1, "eager", 8, "fast")
    alone.measured(Times((0.2,)), None)
    assert alone.median_ratio is None
    assert alone.median_seconds == 0.2


def test_memory_ratios_need_a_plain_peak_that_says_something() -> None:
    rows = [Row(1, "eager", b, m) for b in (1, 256) for m in ("plain", "fast")]
    result = Result("x", [], {}, rows=rows, machine={})
    result.add_memory(1, "eager", "plain", {1: 100, 256: 2**22})
    result.add_memory(1, "eager", "fast", {1: 300, 256: 2**23})
    assert result.of(batch=256, method="fast")[0].peak_ratio == pytest.approx(2)
    assert result.of(batch=1, method="fast")[0].peak_ratio is None
    assert result.of(batch=1, method="fast")[0].peak_bytes == 300


def test_multiply_adds_of_the_papers_network() -> None:
    """The diagonal tier squares all but the first layer, and MC repeats all but the first layer."""
    papers = paper_subject()
    plain = work_of(papers, Method("plain"))
    first = 32 * 32 * 16 * 3 * 9
    rest = 16 * 16 * 32 * 16 * 9 + 8 * 8 * 64 * 32 * 9 + 1024 * 128 + 128 * 128 + 128 * 10
    assert plain == first + rest
    assert work_of(papers, Method("paper")) == first + 2 * rest
    assert work_of(papers, Method("mc", 50)) == first + 50 * rest


class Recurrent(torch.nn.Module):
    """Dropout on the input itself, and between layers, of which the sampler makes one each."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.3)
        self.lstm = torch.nn.LSTM(4, 5, 2, dropout=0.2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(self.dropout(x))[0][:, -1]
        return found


class TimeFirst(torch.nn.Module):
    """Noise, and an output, whose batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.gru = torch.nn.Dropout(0.3), torch.nn.GRU(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.gru(self.dropout(x.transpose(0, 1)))[0]
        return found


def attention() -> torch.nn.Module:
    """Which reshapes to the batch's size."""
    return torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)


@pytest.mark.parametrize(
    ("make_model", "shape"),
    [(mlp, (4,)), (cnn, (3, 8, 8)), (Recurrent, (3, 4)), (TimeFirst, (3, 4)), (attention, (3, 8))],
    ids=["dense", "convolutional", "recurrent", "time first", "attention"],
)
def test_sampling_in_two_programs_is_monte_carlo(make_model: Any, shape: tuple[int, ...]) -> None:
    """Exported with free sizes, and run on others than those of the examples."""
    model = make_model().eval()
    x = torch.randn(5, *shape)
    bnn = mp.convert(model, x, "paper")
    made: list[str] = []

    def make(module: torch.nn.Module, inputs: Any, dynamic: Any, name: str) -> Any:
        made.append(name)
        program = exported(module, inputs, dynamic).module()
        return lambda tensors: program(*tensors)

    with torch.no_grad():
        [(mean, variance)] = sample_with(bnn, make, (torch.randn(97, *shape),), 4000)((x,))
    assert made == ["prefix", "suffix"]
    mc = mp.monte_carlo(model, x, 4000)
    assert ((mean - mc.mean).abs() < 5 * 2**0.5 * mc.mean_error + 1e-6).all()
    assert ((variance - mc.variance).abs() < 5 * 2**0.5 * mc.variance_error + 1e-6).all()


def test_rows_that_influence_each_other_are_no_samples() -> None:
    class Centred(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    model = torch.nn.Sequential(torch.nn.Dropout(0.5), Centred()).eval()
    bnn = mp.convert(model, torch.randn(3, 4), "paper")
    with pytest.raises(NotImplementedError, match="influence each other"):
        sample_with(bnn, lambda *_: None, (torch.randn(6, 4),), 3)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("runtime", ["eager", "compiled", "onnx"])
def test_a_method_gives_the_same_in_every_runtime(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "onnx":
        pytest.importorskip("onnxruntime", reason="comes with the extra onnx")
    measured, x = subject(), torch.randn(3, 4)
    setting = Setting(1, tmp_path, "aot_eager")
    logger = logging.getLogger("torch.onnx")
    monkeypatch.setattr(logger, "level", logging.INFO)
    with torch.no_grad():
        torch._dynamo.reset()
        plain: object = prepare(measured, Method("plain"), runtime, setting)((x,))
        fast: object = prepare(measured, Method("fast"), runtime, setting)((x,))
        expected = mp.convert(measured.plain(), x, "fast")(x)
        if runtime == "onnx":
            assert isinstance(plain, list)
            assert isinstance(fast, list)
            plain, fast = torch.as_tensor(plain[0]), mp.Moments(*map(torch.as_tensor, fast))
        assert isinstance(plain, torch.Tensor)
        assert isinstance(fast, mp.Moments)
        assert logger.level == logging.INFO  # what it is quiet about is the caller's to hear again
        torch.testing.assert_close(plain, measured.plain()(x))
        torch.testing.assert_close(fast.mean, expected.mean)
        torch.testing.assert_close(fast.variance, expected.variance)


def test_a_run_has_a_row_for_everything_and_its_json_is_read_back() -> None:
    plan = small_plan(batches=(1, 2), threads=(1, 2))
    units: dict[str, float] = {}

    def tell(unit: str, done: float, total: float, label: str) -> None:
        assert 0 <= done <= total, unit
        units[unit] = done / total

    result = run(subject, plan, tell, start(subject(), plan))
    assert set(units) == set(plan.units())
    assert all(done == 1 for done in units.values())
    names = ["plain", "MC, T = 3", "fast"]
    expected = [(t, "eager", b, m) for t in (1, 2) for b in (1, 2) for m in names]
    assert [(r.threads, r.runtime, r.batch, r.method) for r in result.rows] == expected
    for row in result.rows:
        [plain] = result.of(threads=row.threads, batch=row.batch, method="plain")
        assert row.median_seconds == pytest.approx(row.median_ratio * plain.median_seconds)  # type: ignore[operator]
        assert row.p99_seconds >= row.median_seconds > 0  # type: ignore[operator]
        assert row.limit is not None
        assert row.error is None
    assert {row.median_ratio for row in result.of(method="plain")} == {1.0}
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert Result.from_dict(json.loads(text)) == result
    with pytest.raises(ValueError, match="schema 7"):
        Result.from_dict({"schema": 7})


def test_what_cannot_run_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(of: Subject, method: Method, runtime: str, setting: Setting) -> object:
        if method.kind == "fast":
            raise RuntimeError("no compiler\nand more")
        if method.kind == "mc":
            return lambda x: 1 / 0
        return prepare(of, method, runtime, setting)

    monkeypatch.setattr(running, "prepare", broken)
    plan = small_plan()
    result = run(subject, plan, quiet, start(subject(), plan))
    assert [row.error for row in result.rows] == [None, "division by zero", "no compiler"]
    assert result.of(method="fast")[0].median_seconds is None


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    monkeypatch.setattr(running.time, "process_time", lambda: 0.0)  # others had it all
    result = run(subject, plan, quiet, start(subject(), plan))
    assert ["not to be trusted" in note for note in result.notes] == [True]
    clock = running.time.perf_counter
    monkeypatch.setattr(running.time, "process_time", lambda: clock())
    assert run(subject, plan, quiet, start(subject(), plan)).notes == []


def test_peak_memory_in_a_process_of_its_own() -> None:
    if sys.platform != "linux":
        pytest.skip("the peak of a process's memory can be seen on Linux only")
    plan = Plan(tuple(choose(["fast"], [])), (65536,), (1,), ("eager",), 0.01, 1)
    result = run(subject, plan, quiet, start(subject(), plan))
    assert not [note for note in result.notes if "peak memory" in note]
    plain, fast = result.of(method="plain")[0], result.of(method="fast")[0]
    assert plain.peak_bytes >= 65536 * 8 * 4  # type: ignore[operator]  # the hidden layer, at least
    assert fast.peak_ratio == pytest.approx(fast.peak_bytes / plain.peak_bytes)  # type: ignore[operator]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_bench_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "my_bench_models", raising=False)
    return "my_bench_models"


def test_the_command(module: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra plots")
    options = ["--input-shape", "4", "--runtime", "eager", "--method", "fast", "--batch", "2"]
    options += ["--threads", "1", "--seconds", "0.01", "--no-memory", "--out", "b.json", "--figure", "b.png"]
    ran = CliRunner().invoke(app, ["bench", f"{module}:make", *options])
    assert ran.exit_code == 0, ran.output
    assert "fast" in ran.stdout
    found = Result.from_dict(json.loads((tmp_path / "b.json").read_text()))
    assert found.complete
    assert found.inputs == ["float32[batch, 4]"]
    assert [row.method for row in found.rows] == ["plain", "fast"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_on_a_saved_network(module: str) -> None:
    mp.save(mp.convert(mlp(), torch.zeros(2, 4), "fast"), "saved.pt2")
    options = ["--runtime", "eager", "--batch", "2", "--threads", "1", "--seconds", "0.01", "--no-memory"]
    ran = CliRunner().invoke(app, ["bench", "saved.pt2", *options, "--out", "b.json"])
    assert ran.exit_code == 0, ran.output
    plain, saved = Result.from_dict(json.loads(Path("b.json").read_text())).rows
    assert "--original" in str(plain.error)
    assert saved.median_seconds
    assert saved.median_ratio is None
    ran = CliRunner().invoke(app, ["bench", "saved.pt2", *options, "--original", f"{module}:make"])
    assert ran.exit_code == 0, ran.output
    assert "not measured" not in ran.stdout


def test_what_was_measured_is_shown_though_it_cannot_be_written(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    options = ["--input-shape", "4", "--runtime", "eager", "--method", "fast", "--batch", "2"]
    options += ["--threads", "1", "--seconds", "0.01", "--no-memory", "--out", "b.json"]
    ran = CliRunner().invoke(app, ["bench", f"{module}:make", *options])
    assert ran.exit_code == 1
    assert "no space left" in ran.stderr
    assert "fast" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:make", "--input-shape", "4"], "nowhere"),
        (["torch.nn:Identity"], "--input-shape"),
        (["--input-shape", "4"], "name it"),
        (["--runtime", "tpu"], "tpu"),
        (["--method", "guess"], "guess"),
        (["--batch", "0"], "at least 1"),
        (["--samples", "1"], "at least two"),
        (["--seconds", "0"], "above 0"),
        (["--out", "nowhere/b.json"], "no such folder"),
        (["--out", "."], "it is a folder"),
        (["--figure", "nowhere/b.png"], "no such folder"),
        (["--figure", "b.gif"], ".png, .svg, .pdf"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(app, ["bench", *arguments])
    assert ran.exit_code == 1
    assert message in ran.stderr
