"""mp.validate: figures against independent computations, bad input, partial reports."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
import vision
from momentprop.capture.choice import Choice
from momentprop.network import BayesianNetwork
from momentprop.validation import latency, sampling
from momentprop.validation.equivalence import Classes, Samples, equivalent_samples
from momentprop.validation.inputs import Inputs
from momentprop.validation.interruption import between_steps
from momentprop.validation.layers import layer_rows, propagated_nodes, sampled_nodes
from momentprop.validation.outputs import Layout
from momentprop.validation.sampling import sample
from momentprop.validation.tiers import convert_tiers
from momentprop.validation.verdict import GOOD, POOR, judge


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 20),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(20, 12),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, 3),
    ).eval()


def batches(n: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator)
    y = torch.randint(3, (n,), generator=generator)
    return list(zip(x.split(10), y.split(10), strict=True))


def test_labels_and_novel_inputs_need_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision.unfit(tmp_path, monkeypatch)
    report = mp.validate(classifier(), batches(), 20, [3 * torch.randn(15, 6)], tiers=["paper"], layers=False)
    assert {"ece", "ood_auroc"} <= report.figures["paper"].keys()


def test_a_classifier() -> None:
    model = classifier()
    model.train()
    model[4].eval()
    novel = [3 * torch.randn(15, 6)]
    report = mp.validate(model, batches(), 100, novel)
    assert [module.training for module in model] == [i != 4 for i in range(7)]  # left as they were
    assert (report.task, report.n_inputs, report.n_samples, report.n_ood) == ("classification", 24, 100, 15)
    assert list(report.figures) == ["plain", "MC dropout", "paper", "fast", "accurate"]
    for figures in report.figures.values():
        assert {"accuracy", "nll", "brier", "ece", "ood_auroc"} <= figures.keys()
    assert report.figures["accurate"]["std_ratio"] == pytest.approx(1, abs=0.15)
    assert report.figures["plain"]["std_ratio"] == 0
    assert set(report.worths) == {"paper", "fast", "accurate"}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["n_inputs"] == 24
    assert "Agreement with MC dropout" in str(report)
    assert str(report.verdict) in str(report)


def test_a_classifier_that_ends_in_sharp_probabilities() -> None:
    """Underflow is no infinite divergence, and outputs that MC does not know are left out, and counted."""
    model = nn.Sequential(*classifier(), nn.Softmax(1)).eval()
    with torch.no_grad():
        model[6].weight.mul_(60)
    report = mp.validate(model, batches(60), 100, tiers=["accurate"], layers=False)
    for name in ("plain", "accurate"):
        assert math.isfinite(report.figures[name]["kl"])
    assert report.figures["plain"]["kl"] > report.figures["accurate"]["kl"]
    left_out = report.figures["MC dropout"]["unknown_share"]
    assert 0 < left_out < 1
    assert f"Left out: {left_out:.1%} of the outputs" in str(report)
    assert report.figures["accurate"]["std_ratio"] == pytest.approx(1, abs=0.15)


def test_a_regression() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    x = torch.randn(30, 6)
    report = mp.validate(model, [(x, x.sum(1, keepdim=True))], 60, layers=False)
    assert report.task == "regression"
    for method in report.figures:
        assert report.curves[method]["coverage"]["level"][0] == 0.5
        assert {"nll", "rmse", "crps", "coverage_90"} <= report.figures[method].keys()


def test_moments_alone() -> None:
    report = mp.validate(
        classifier(), [x for x, _ in batches()], 40, targets=False, tiers=["fast"], layers=False
    )
    assert (report.task, list(report.worths)) == ("moments", ["fast"])


def test_streamed_sampling_agrees_with_monte_carlo() -> None:
    """Other masks, the same distribution."""
    model = classifier()
    x = batches()[0][0]
    made = convert_tiers(model, Inputs((x,)), ["fast"], "error", Choice.of(model, None, (x,), {}))
    found = sample(
        model, made.trace, Inputs((x,)), Layout("classification", "multiclass", None, (3,)), 4000, 5
    )
    mc = mp.monte_carlo(model, x, n_samples=4000, seed=77)
    error = (mc.mean_error.double() ** 2 + found.mean_error**2).sqrt()
    assert bool(((found.mean - mc.mean).abs() < 5 * error).all())
    error = (mc.variance_error.double() ** 2 + found.variance_error**2).sqrt()
    assert bool(((found.variance - mc.variance).abs() < 5 * error).all())
    assert found.probs is not None
    torch.testing.assert_close(found.probs[:, 0].float(), mp.classify(mc).probs, atol=0.01, rtol=0)


def test_samples_are_worth_what_they_are() -> None:
    """MC dropout with 20 samples, taken for a tier, is worth about 20 samples."""
    model = classifier()
    x = torch.cat([x for x, _ in batches(60)])
    made = convert_tiers(model, Inputs((x,)), ["fast"], "error", Choice.of(model, None, (x,), {}))
    found = sample(
        model, made.trace, Inputs((x,)), Layout("classification", "multiclass", None, (3,)), 2000, 0
    )
    assert found.probs is not None
    worths = []
    for seed in range(1, 6):
        few = mp.classify(mp.monte_carlo(model, x, n_samples=20, seed=seed)).probs.double()
        worths.append(
            equivalent_samples(Classes().kl(found.probs[:, 0], few).mean().item(), found.curve).value
        )
    assert sum(worths) / 5 == pytest.approx(20, rel=0.25)


def hooked_samples(model: nn.Sequential, x: Tensor, count: int) -> dict[str, Tensor]:
    """[count, n, elements] of what every module gives, in training mode with torch's own dropout."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: seen.__setitem__(name, out.detach()))
        for name, module in model.named_children()
    ]
    torch.manual_seed(0)
    model.train()
    with torch.no_grad():
        model(x.repeat(count, *[1] * (x.dim() - 1)))  # every copy has a mask of its own
    model.eval()
    for handle in handles:
        handle.remove()
    return {name: value.reshape(count, len(x), -1).double() for name, value in seen.items()}


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
def test_layers_agree_with_forward_hooks(tier: str) -> None:
    """Every figure of every row from the modules themselves and from the network cut off behind them."""
    model, count = classifier(), 20_000
    x = batches()[0][0][:4]
    network = mp.convert(model, x, tier)
    assert isinstance(network, BayesianNetwork)
    sampled = sampled_nodes(network, Inputs((x,)), count, 3)
    rows = layer_rows(network, sampled, propagated_nodes(network, Inputs((x,))))
    hooked = hooked_samples(model, x, count)
    assert [row.module for row in rows] == ["2", "3", "4", "5", "6"]
    before = 0.0
    for row in rows:
        values, mc = hooked[row.module], sampled[row.node]
        assert mc.mean_error is not None
        assert mc.variance_error is not None
        for mine, other, error in (
            (mc.mean, values.mean(0), mc.mean_error),
            (mc.variance, values.var(0), mc.variance_error),
        ):
            assert bool(((mine - other).abs() <= 6 * math.sqrt(2) * error + 1e-6).all())
        # inside, every tier has variances of single elements; the covariance is of the outputs
        cut = mp.convert(
            model[: int(row.module) + 1], x, tier if row.module == "6" or tier == "paper" else "fast"
        )
        ours = cut(x)
        varies = values.var(0) > 0
        std, true = ours.std.double()[varies], values.std(0)[varies]
        shift = ((ours.mean - values.mean(0))[varies] / true).abs().median().item() / 0.6745
        ratio = (std.square().sum() / true.square().sum()).sqrt().item()
        assert row.std_ratio == pytest.approx(ratio, abs=0.015)
        correlation = torch.corrcoef(torch.stack([std, true]))[0, 1].item()
        assert row.std_correlation == pytest.approx(correlation, abs=0.02)
        assert row.mean_shift == pytest.approx(shift, abs=0.02)
        assert row.introduced == pytest.approx(abs(math.log(ratio)) + shift - before, abs=0.05)
        before = abs(math.log(ratio)) + shift
    exact = {row.module: row for row in rows}
    assert exact["2"].std_ratio == pytest.approx(1, abs=0.03)  # dropout and linear are exact
    assert exact["3"].std_ratio == pytest.approx(1, abs=0.03)
    if tier == "accurate":
        assert exact["6"].std_ratio == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
def test_every_tier_has_layers(tier: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    report = mp.validate(model, [torch.randn(6, 1, 8, 8)], 200, targets=False, tiers=[tier])
    rows = report.layers[tier]
    assert rows[-1].module == "6"
    assert rows[0].std_ratio == pytest.approx(1, abs=0.1)
    assert all(math.isfinite(row.error) for row in rows)
    last = report.figures[tier]["std_ratio"]
    assert isinstance(last, float)
    assert rows[-1].std_ratio == pytest.approx(last, abs=0.25)


def test_interrupted_sampling_gives_a_partial_report() -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "sampling" and done > 0.8 * total:
            raise KeyboardInterrupt

    report = mp.validate(classifier(), batches(120), 40, layers=False, progress=stop)
    assert report.partial
    assert report.n_inputs == 50  # the first batch of inputs
    assert "PARTIAL" in str(report)


def test_novel_inputs_are_sampled_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before there is anything: the report of the known inputs stands."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "sampling novel inputs":
            raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "_LEAST", 1000)
    novel = [(3 * torch.randn(10, 6), torch.zeros(10))]  # targets, which do not matter
    report = mp.validate(classifier(), batches(), 40, novel, layers=False, progress=stop)
    assert (report.partial, report.n_inputs, report.n_ood) == (True, 24, 10)
    assert "ood_auroc" in report.figures["fast"]
    assert "ood_auroc" not in report.figures["MC dropout"]


def test_ctrl_c_waits_for_the_step_to_end() -> None:
    def loop(presses: int) -> None:
        with between_steps() as check:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            steps.append(presses)
            check()
            steps.append(0)

    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        loop(1)
    with pytest.raises(KeyboardInterrupt):
        loop(2)  # who insists is obeyed
    loop(0)
    assert steps == [1, 0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_standard_errors_of_mc() -> None:
    """Of a Gaussian mean 1 / sqrt(T), and of its std 1 / sqrt(2 T)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(400, 1))
    report = mp.validate(model, [torch.randn(10, 400)], 400, targets=False, tiers=["fast"], layers=False)
    assert report.figures["MC dropout"]["mean_error"] == pytest.approx(1 / 20)
    assert report.figures["MC dropout"]["std_error"] == pytest.approx(1 / math.sqrt(800), rel=0.1)
    assert "Standard errors of MC dropout" in str(report)


def test_classes_may_come_last() -> None:
    """A tagger: logits [n, length, classes], tags [n, length]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).eval()
    x = torch.randn(12, 5, 4)
    report = mp.validate(model, [(x, model(x).argmax(-1))], 60, tiers=["accurate"], layers=False)
    assert report.figures["plain"]["accuracy"].value == 1
    assert report.figures["accurate"]["entropy_correlation"] > 0.95
    with pytest.raises(mp.InputError, match=r"class indices \[12, 5\]|class indices \[12, 3\]"):
        mp.validate(model, [(x, torch.zeros(12, dtype=torch.long))], 20)


def test_inputs_without_any_variance_do_not_spoil_the_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 2, bias=False))
    x = torch.randn(20, 6)
    x[3] = 0
    report = mp.validate(model, [x], 60, targets=False, tiers=["fast"], layers=False)
    assert math.isfinite(report.t_eq().value)
    with pytest.raises(mp.InputError, match="do not vary"):
        mp.validate(model, [0 * x], 20, targets=False, tiers=["fast"])


def test_memory_does_not_grow_with_samples_or_outputs() -> None:
    """What is kept of a regression, for its mixture, has a bound over all inputs; so have classes."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 40))
    x = torch.randn(20, 6)
    trace = convert_tiers(model, Inputs((x,)), ["fast"], "error", Choice.of(model, None, (x,), {})).trace
    layout = Layout("regression", "multiclass", None, (40,))
    found = sample(model, trace, Inputs((x,)), layout, 1500, 0)
    assert found.samples is not None
    assert found.samples.shape == (1000, 20, 40)
    assert Layout("classification", "multiclass", None, (50_000, 100)).size == 50_000
    assert Layout("classification", "multiclass", None, (10, 100)).size == 640


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "empty"),
        ([(torch.randn(4, 6), torch.randint(3, (3,)))], "different lengths"),
        ([(torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))], "labels must be within 0..2"),
        ([(torch.full((4, 6), math.nan), torch.randint(3, (4,)))], "NaN"),
        ([torch.randn(4, 6)], "no target"),
        ([(torch.randn(4, 6), torch.randn(4, 2))], "one target per output"),
        (torch.randn(4, 6), "must give batches"),
        ([(torch.randn(4, 5), torch.randint(3, (4,)))], "does not run on these inputs"),
        ([(torch.ones(4, 6).long(), torch.randint(3, (4,)))], "does not run on these inputs, int64"),
    ],
)
def test_bad_input(loader: Any, message: str) -> None:
    with pytest.raises(mp.InputError, match=message):
        mp.validate(classifier(), loader, 20)


def test_what_cannot_be_converted_is_named() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(x.unflatten(1, (2, 3)) @ x.unflatten(1, (2, 3)).mT)

    with pytest.raises(mp.MissingRuleError, match="det"):
        mp.validate(nn.Sequential(nn.Dropout(0.5), Sorted()), [torch.randn(4, 6)], 20, targets=False)


def test_verdicts_follow_the_thresholds() -> None:
    good = {"std_ratio": 1.02, "std_correlation": 0.99, "mean_shift": 0.02}
    bad = {"std_ratio": 0.4, "std_correlation": 0.5, "mean_shift": 0.9}
    found = judge(
        {"fast": Samples(8), "accurate": Samples(200, ">")}, {"fast": bad, "accurate": good}, {}, {}, 1000
    )
    assert (found.recommendation, found.grades) == ("accurate", {"fast": POOR, "accurate": GOOD})
    cheap = judge(
        {"fast": Samples(190), "accurate": Samples(200)},
        {"fast": good, "accurate": good},
        {"fast": 2.0, "accurate": 7.0},
        {},
        1000,
    )
    assert cheap.recommendation == "fast"
    none = judge({"fast": Samples(8)}, {"fast": bad}, {}, {}, 1000)
    assert none.recommendation == "mc"
    assert "Use MC dropout here." in str(none)


def test_names_are_escaped(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(6, 8))
            self.drop = nn.Dropout(0.3)
            self.add_module("</script><b>", nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            for module in self.children():
                x = module(x)
            return x

    report = mp.validate(Named(), [torch.randn(8, 6)], 40, targets=False, name="<img src=x onerror=alert(1)>")
    text = report.save_html(tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<b>" not in text.split("<main>")[1].split('id="data"')[1]
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text
    assert len(text) < 5_000_000
    for outside in ("http://", "https://"):  # but for the address in the library's own comment
        assert text.count(outside) <= 1
