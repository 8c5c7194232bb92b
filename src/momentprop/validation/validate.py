"""mp.validate: one model, one set of inputs, every tier beside MC dropout."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from momentprop.capture.choice import Choice, Where
from momentprop.capture.trace import Trace
from momentprop.errors import InputError
from momentprop.predict.outputs import Select, leaves, name_of
from momentprop.validation.batch_first import BatchDim, BatchFirst, moved
from momentprop.validation.comparison import Methods, add_novelty, compare
from momentprop.validation.findings import MC, PLAIN, SAVED
from momentprop.validation.inputs import Inputs, collect, task_of
from momentprop.validation.latency import measure
from momentprop.validation.layers import LayerRow, compare_layers
from momentprop.validation.outputs import Layout, one_output
from momentprop.validation.report import Report
from momentprop.validation.sampling import Sampled, output_of, sample
from momentprop.validation.tiers import Predicted, convert_tiers, predict
from momentprop.version import __version__

Progress = Callable[[str, int, int], None]  # stage, done, total

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
    select: Select = None,
    layers: bool = True,
    unsupported: str = "error",
    seed: int = 0,
    name: str | None = None,
    progress: Progress | None = None,
    batch_dim: BatchDim = 0,
    dropout: Where | None = None,
) -> Report:
    """Compare every tier with MC dropout on one's own model and data.

    Args:
        model: a dropout network. It is not modified.
        loader: batches (x, y), (x1, x2, y) or, without targets, x or (x1, x2); or dictionaries of inputs by
            name, with the target under `labels`.
        n_samples: of MC dropout, for every input. What a tier is worth can be told up to half of it.
        ood_loader: batches of novel inputs, as in `loader` or without targets.
        targets: whether batches end with targets.
        task: "classification", "regression" or "moments"; by default classes where targets are integers, a
            regression where they are other numbers.
        n_inputs: at most so many inputs, the first ones.
        tiers: which ones; by default all, with the outputs of `accurate` that `convert` chooses.
        saved: a network that `mp.load` read, or any other that returns Moments, to be compared as well.
        select: which of several outputs, by name or position; by default `logits`, or the only one.
        layers: compare node by node too.
        unsupported: as in `convert`.
        seed: fixes the masks.
        name: of the model, in the report.
        progress: called as (stage, done, total).
        batch_dim: the dimension of the inputs that is the batch, or one for each input. In outputs it is
            the first.
        dropout: which dropouts count, as in `convert`.

    Returns:
        A `Report`: `print(report)`, `report.to_dict()`, `report.save_html("report.html")`. After Ctrl-C
        during sampling it is about the inputs done so far, and `report.partial` is true.

    >>> import momentprop as mp
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    >>> batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    >>> report = mp.validate(net, batches, n_samples=40)
    >>> print(report.task, report.n_inputs, *report.worths)
    classification 8 paper fast accurate
    """
    if n_samples < 20:
        raise ValueError(f"n_samples must be at least 20, not {n_samples}")
    if n_inputs < 1:
        raise ValueError(f"n_inputs must be at least 1, not {n_inputs}")
    inputs, name = collect(loader, n_inputs, targets, batch_dim=batch_dim), name or type(model).__name__
    few = tuple(moved(inputs.first(2).tensors, batch_dim, back=True))
    args, kwargs = ((), dict(zip(inputs.names, few, strict=True))) if inputs.names else (few, {})
    choice = Choice.of(model, dropout, args, kwargs)
    if batch_dim != 0 or inputs.names:
        model = BatchFirst(model, batch_dim, inputs.names)
        saved = None if saved is None else BatchFirst(saved, batch_dim, inputs.names)
    task = task_of(inputs.targets, task)
    tell = progress or (lambda stage, done, total: None)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _Validation(model, inputs, task, select, n_samples, seed, tell, choice).run(
            ood_loader, tiers, saved, layers, unsupported, name
        )
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass
class _Validation:
    """One run: what it is about, and what it has found so far."""

    model: nn.Module
    inputs: Inputs
    task: str
    select: Select
    n_samples: int
    seed: int
    tell: Progress
    choice: Choice
    trace: Trace = field(init=False)
    networks: dict[str, nn.Module] = field(init=False)
    layout: Layout = field(init=False)
    output: int = field(init=False)  # the position of the one that was selected

    def run(
        self,
        ood_loader: Iterable[Any] | None,
        tiers: Sequence[str] | None,
        saved: nn.Module | None,
        layers: bool,
        unsupported: str,
        name: str,
    ) -> Report:
        example = self._example()
        novel = None if ood_loader is None else self._novel(ood_loader)
        self.tell("converting", 0, 1)
        made = convert_tiers(self.model, self.inputs, tiers, unsupported, self.choice)
        self.trace = made.trace
        self.networks = dict(made.networks)
        if saved is not None:
            self.networks[SAVED] = saved
        _, head = output_of(self.trace, self.output)
        self.layout = Layout.of(example, self.task, head, self.inputs.targets)
        if self.inputs.targets is not None:
            self.layout.check(self.inputs.targets)
        self.tell("predicting", 0, 1)
        predicted = self._predicted(self.inputs)
        self.tell("timing", 0, 1)
        latency = measure(self.model, self.networks, self.inputs)
        few = self.inputs.first(_LAYER_INPUTS)
        layer_samples = min(self.n_samples, _LAYER_SAMPLES)
        rows: dict[str, list[LayerRow]] = {}
        missing_layers: dict[str, str] = {}
        if layers:
            rows, missing_layers = compare_layers(
                made.networks, few, layer_samples, self.seed + 1, partial(self.tell, "layers")
            )
        if isinstance(self.model, BatchFirst):
            own = self.model.own_name
            rows = {
                tier: [replace(row, module=own(row.module)) for row in found] for tier, found in rows.items()
            }
        mc = self._sampled(self.inputs, self.n_samples, "sampling")
        self.tell("comparing", 0, 1)
        predicted = {method: row.first(len(mc)) for method, row in predicted.items()}
        found = compare(predicted, mc, self.layout, self.inputs.targets, latency, rows)
        interrupted = mc.interrupted
        if novel is not None:
            self.tell("predicting novel inputs", 0, 1)
            others: Methods = dict(self._predicted(novel))
            sampled = None if interrupted else self._sampled_novel(novel)
            interrupted = sampled is None or sampled.interrupted
            if sampled is not None:
                others[MC] = sampled
            add_novelty(found, {**predicted, MC: mc}, others, self.layout)
        return Report(
            model=name,
            task=self.task,
            n_inputs=len(mc),
            n_samples=mc.n_samples,
            seed=self.seed,
            n_ood=0 if novel is None else len(novel),
            partial=interrupted,
            outputs=self.layout.shape,
            latency=latency,
            layers=rows,
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
            **found,
        )

    def _example(self) -> Tensor:
        """Run the model on two inputs: this shows before anything long starts whether it runs at all."""
        given = self.inputs.first(2).tensors
        try:
            with torch.no_grad():
                outputs = self.model(*given)
        except Exception as error:
            inputs = " and ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in given)
            raise InputError(
                f"the model does not run on these inputs, {inputs}: {type(error).__name__}: {error}"
            ) from error
        found = leaves(outputs)
        self.output = list(found).index(name_of(found, self.select))
        example = one_output(outputs, self.output)
        if example.dim() == 0 or len(example) != len(given[0]):
            raise InputError(
                f"the output must have a row for every input; {len(given[0])} inputs gave "
                f"{list(example.shape)}"
            )
        if not bool(example.isfinite().all()):
            raise InputError("the plain network gives NaN or infinite outputs on the first of these inputs")
        return example

    def _novel(self, loader: Iterable[Any]) -> Inputs:
        """Novel inputs need no targets, but may have some."""
        rest = iter(loader)
        first = list(islice(rest, 1))
        width = len(self.inputs.tensors)
        has = bool(first) and isinstance(first[0], (tuple, list)) and len(first[0]) > width
        dim = self.model.batch_dim if isinstance(self.model, BatchFirst) else 0
        novel = collect(chain(first, rest), len(self.inputs), has, "the novel data", dim)
        mine, other = (
            [f"{t.dtype} {list(t.shape[1:])}" for t in inputs.tensors] for inputs in (self.inputs, novel)
        )
        if mine != other:
            raise InputError(f"novel inputs are {', '.join(other)} each, and the others {', '.join(mine)}")
        return novel

    def _predicted(self, inputs: Inputs) -> dict[str, Predicted]:
        networks = {PLAIN: self.model} | self.networks
        return {name: predict(n, inputs, self.layout, self.output) for name, n in networks.items()}

    def _sampled(self, inputs: Inputs, n_samples: int, stage: str) -> Sampled:
        where: dict[str, Any] = {"output": self.output, "progress": partial(self.tell, stage)}
        return sample(self.model, self.trace, inputs, self.layout, n_samples, self.seed, **where)

    def _sampled_novel(self, novel: Inputs) -> Sampled | None:
        """Return None if interrupted before there was anything: the rest is worth a report all the same."""
        try:
            return self._sampled(novel, min(self.n_samples, _OOD_SAMPLES), "sampling novel inputs")
        except KeyboardInterrupt:
            return None
