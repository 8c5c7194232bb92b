"""mp.validate: one model, one set of inputs, every tier beside MC dropout."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from momentprop.errors import InputError, MissingExtraError
from momentprop.validation import figures as measured
from momentprop.validation.equivalence import equivalent_samples
from momentprop.validation.findings import MC, PLAIN
from momentprop.validation.inputs import Inputs, check_targets, collect, task_of
from momentprop.validation.latency import LatencyRow, measure
from momentprop.validation.layers import LayerRow, compare_layers
from momentprop.validation.outputs import Layout, evenly, one_output
from momentprop.validation.report import Report
from momentprop.validation.sampling import Sampled, kind_of, output_of, sample
from momentprop.validation.tiers import Predicted, Tiers, convert_tiers, plain, predict
from momentprop.validation.verdict import judge
from momentprop.version import __version__

Progress = Callable[[str, int, int], None]  # stage, done, total

_BATCH = 50
_SCATTER = 1000  # points of the chart of stds
_LAYER_INPUTS, _LAYER_SAMPLES = 16, 1000
_OOD_SAMPLES = 200


def validate(
    model: nn.Module,
    loader: Iterable[Any],
    n_samples: int = 1000,
    ood_loader: Iterable[Any] | None = None,
    targets: bool = True,
    *,
    task: str | None = None,
    n_inputs: int = 500,
    tiers: Sequence[str] | None = None,
    saved: nn.Module | None = None,
    output: int = 0,
    layers: bool = True,
    unsupported: str = "error",
    seed: int = 0,
    name: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare every tier with MC dropout on one's own model and data.

    Args:
        model: a dropout network. It is not modified.
        loader: batches (x, y), (x1, x2, y) or, without targets, x or (x1, x2).
        n_samples: of MC dropout, for every input. What a tier is worth can be told up to half of it.
        ood_loader: batches of novel inputs, as in `loader` or without targets.
        targets: whether batches end with targets.
        task: "classification", "regression" or "moments"; by default classes where targets are integers, a
            regression where they are other numbers.
        n_inputs: at most so many inputs, the first ones.
        tiers: which ones; by default all, `accurate` for up to 64 outputs per input.
        saved: a network that `mp.load` read, or any other that returns Moments, to be compared as well.
        output: which of several output tensors.
        layers: compare node by node too.
        unsupported: as in `convert`.
        seed: fixes the masks.
        name: of the model, in the report.
        progress: called as (stage, done, total).

    Returns:
        A `Report`: `print(report)`, `report.to_dict()`, `report.save_html("report.html")`. After Ctrl-C
        during sampling it is about the inputs done so far, and `report.partial` is true.

    >>> import momentprop as mp
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    >>> batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    >>> report = mp.validate(net, batches, n_samples=40)
    >>> report.task, report.n_inputs, sorted(report.worths)
    ('classification', 8, ['accurate', 'fast', 'paper'])
    """
    if n_samples < 20:
        raise ValueError(f"n_samples must be at least 20, not {n_samples}")
    if n_inputs < 1:
        raise ValueError(f"n_inputs must be at least 1, not {n_inputs}")
    inputs = collect(loader, n_inputs, targets)
    task = task_of(inputs.targets, task)
    _check_extras(task, inputs.targets is not None, ood_loader is not None)
    tell = progress or (lambda stage, done, total: None)
    was_training = model.training
    model.eval()
    try:
        return _Validation(model, inputs, task, output, n_samples, seed, tell).run(
            ood_loader, targets, tiers, saved, layers, unsupported, name or type(model).__name__
        )
    finally:
        model.train(was_training)


class _Validation:
    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        task: str,
        output: int,
        n_samples: int,
        seed: int,
        tell: Progress,
    ) -> None:
        self.model, self.inputs, self.task = model, inputs, task
        self.output, self.n_samples, self.seed, self.tell = output, n_samples, seed, tell

    def run(
        self,
        ood_loader: Iterable[Any] | None,
        targets: bool,
        tiers: Sequence[str] | None,
        saved: nn.Module | None,
        layers: bool,
        unsupported: str,
        name: str,
    ) -> Report:
        self.tell("converting", 0, 1)
        made = convert_tiers(self.model, self.inputs, tiers, unsupported)
        self.networks: dict[str, nn.Module] = dict(made.networks)
        if saved is not None:
            self.networks["saved"] = saved
        _, head = output_of(made.trace, self.output)
        with torch.no_grad():
            example = one_output(self.model(*self.inputs.first(2).tensors), self.output)
        self.layout = Layout.of(example, self.task, head)
        whole = example.new_zeros(1).expand(len(self.inputs), *example.shape[1:])
        check_targets(self.inputs.targets, self.task, whole, self.layout.kind)
        novel = None if ood_loader is None else self._novel(ood_loader, targets)
        self.tell("predicting", 0, 1)
        rows = self._predicted(self.inputs)
        self.tell("timing", 0, 1)
        latency = measure(self.model, self.networks, self.inputs)
        found: dict[str, list[LayerRow]] = {}
        missing_layers: dict[str, str] = {}
        few = self.inputs.first(_LAYER_INPUTS)
        layer_samples = min(self.n_samples, _LAYER_SAMPLES)
        if layers:
            self.tell("layers", 0, 1)
            for tier, found_rows, why in compare_layers(made.networks, few, layer_samples, self.seed + 1):
                found[tier] = found_rows
                if why:
                    missing_layers[tier] = why
        mc = self._sampled(made, self.inputs, self.n_samples, "sampling")
        rows = {method: _first(row, len(mc)) for method, row in rows.items()}
        everything: dict[str, Predicted | Sampled] = {PLAIN: rows.pop(PLAIN), MC: mc, **rows}
        report = self._compared(everything, mc, latency, found)
        curves = report["curves"]
        if novel is not None:
            self._compare_novel(everything, made, novel, report["figures"], curves, mc.interrupted)
        return Report(
            model=name,
            task=self.task,
            n_inputs=len(mc),
            n_samples=mc.n_samples,
            seed=self.seed,
            n_ood=0 if novel is None else len(novel),
            partial=mc.interrupted,
            outputs=self.layout.shape,
            latency=latency,
            layers={tier: r for tier, r in found.items() if r},
            layer_inputs=len(few),
            layer_samples=layer_samples,
            missing=made.missing,
            missing_layers=missing_layers,
            versions={
                "momentprop": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            machine=f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
            **report,
        )

    def _novel(self, loader: Iterable[Any], targets: bool) -> Inputs:
        batches = list(loader)
        # novel inputs need no targets, but may have some
        width = len(self.inputs.tensors)
        has = targets and bool(batches) and isinstance(batches[0], (tuple, list)) and len(batches[0]) > width
        novel = collect(batches, len(self.inputs), has, "the novel data")
        for mine, other in zip(self.inputs.tensors, novel.tensors, strict=True):
            if mine.shape[1:] != other.shape[1:] or mine.dtype != other.dtype:
                raise InputError(
                    f"novel inputs are {other.dtype} {list(other.shape[1:])} each, and the others "
                    f"{mine.dtype} {list(mine.shape[1:])}"
                )
        return novel

    def _predicted(self, inputs: Inputs) -> dict[str, Predicted]:
        rows = {PLAIN: plain(self.model, inputs, self.layout, self.output, _BATCH)}
        for tier, network in self.networks.items():
            rows[tier] = predict(network, inputs, self.layout, self.output, _BATCH)
        return rows

    def _sampled(self, made: Tiers, inputs: Inputs, n_samples: int, stage: str) -> Sampled:
        return sample(
            self.model,
            made.trace,
            inputs,
            self.layout,
            n_samples,
            self.seed,
            output=self.output,
            batch=_BATCH,
            progress=lambda done, total: self.tell(stage, done, total),
        )

    def _compared(
        self,
        methods: dict[str, Predicted | Sampled],
        mc: Sampled,
        latency: list[LatencyRow],
        layers: dict[str, list[LayerRow]],
    ) -> dict[str, Any]:
        kind, truth = kind_of(self.layout), _predictive(mc)
        found: dict[str, measured.Figures] = {}
        curves: dict[str, dict[str, Any]] = {}
        worths, worst = {}, {}
        targets = self.inputs.targets
        y = None if targets is None else self.layout.target_rows(targets)[: len(mc)]
        for name, rows in methods.items():
            found[name], curves[name] = {}, {}
            if rows is not mc:
                found[name] |= measured.moment_figures(rows, mc)
                kl = kind.kl(truth, _predictive(rows)).mean().item()
                found[name]["kl"] = kl
                if name != PLAIN:
                    worths[name] = equivalent_samples(kl, mc.curve)
                    assert isinstance(rows, Predicted)
                    worst[name] = measured.worst_outputs(rows, mc)
            if rows.probs is not None and mc.probs is not None:
                found[name] |= measured.class_figures(rows.probs, mc.probs, y)
                if y is not None:
                    curves[name] |= measured.class_curves(rows.probs, y)
            elif self.task == "regression" and y is not None:
                more, drawn = measured.regression_figures(rows, y)
                found[name] |= more
                curves[name] |= drawn
        cost = {name: latency[-1].ratios[name] for name in worths} if latency else {}
        verdict = judge(worths, found, cost, layers, mc.n_samples)
        chosen = evenly(mc.variance.numel(), _SCATTER)
        scatter = {
            name: rows.variance.flatten()[chosen].sqrt().tolist()
            for name, rows in methods.items()
            if name != PLAIN
        }
        return {
            "figures": found,
            "curves": curves,
            "worths": worths,
            "worst_outputs": worst,
            "convergence": mc.curve,
            "scatter": scatter,
            "verdict": verdict,
        }

    def _compare_novel(
        self,
        methods: dict[str, Predicted | Sampled],
        made: Tiers,
        novel: Inputs,
        figures: dict[str, measured.Figures],
        curves: dict[str, dict[str, Any]],
        interrupted: bool,
    ) -> None:
        rows: dict[str, Predicted | Sampled] = dict(self._predicted(novel))
        if not interrupted:
            rows[MC] = self._sampled(made, novel, min(self.n_samples, _OOD_SAMPLES), "sampling novel inputs")
        for name, other in rows.items():
            more, drawn = measured.novelty_figures(measured.novelty(methods[name]), measured.novelty(other))
            if self.layout.is_classes or name != PLAIN:  # a plain regression has no score
                figures[name] |= more
                curves[name] |= drawn


def _predictive(rows: Predicted | Sampled) -> Tensor:
    """As equivalence.py has it: [n, positions, K], or [n, elements, 2]."""
    return rows.probs if rows.probs is not None else torch.stack([rows.mean, rows.variance], -1)


def _first(rows: Predicted, count: int) -> Predicted:
    probs, information = (None if v is None else v[:count] for v in (rows.probs, rows.mutual_information))
    return Predicted(rows.mean[:count], rows.variance[:count], probs, information)


def _check_extras(task: str, has_targets: bool, has_novel: bool) -> None:
    """At once, not after the sampling."""
    needed = {"torchmetrics": task == "classification" and has_targets, "sklearn": has_novel}
    for package, is_needed in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise MissingExtraError({"sklearn": "scikit-learn"}.get(package, package), "metrics")
