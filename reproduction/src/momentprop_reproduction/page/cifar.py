"""CIFAR-10 on the results page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from momentprop_reproduction.experiments.published import (
    PAPER_CATCH_UP,
    PAPER_ENTROPY_R,
    PAPER_SOURCE,
    PAPER_TEN,
)
from momentprop_reproduction.page.markdown import interval, number, table

_PRINTED_AS = {"NN": "NN", "MC": "MC", "paper": "MP"}  # the paper's name of a method


def section(record: dict[str, Any], images: str) -> str:
    found = record["summary"]
    names = _names(found)
    few, truth = (f"MC T={found[key]:,}" for key in ("n_samples", "truth_samples"))
    members = found["n_members"]
    pictures = "\n\n".join(f"![{name}]({images}/{name})" for name in record["figures"])
    caveat = (
        "The images are JPEG re-encodings of CIFAR-10, not the original pixels the paper used: figures come\n"
        "out a little worse for it, and stand beside the paper's with that in mind."
        if "JPEG" in found["data"]
        else ""
    )
    return f"""## CIFAR-10 (section 4.3, figures 4 to 9)

The paper's network (three convolutions of 16, 32 and 64 channels with max pooling, two dense layers of 128,
dropout 0.3), {members} networks of all ten classes and {members} of five (airplane, cat, deer, dog, ship), to
which the other five are novel: {found["n_known"]:,} test images of known and {found["n_novel"]:,} of novel
classes. "Paper" is {PAPER_SOURCE}, as quoted in this project's plan; what is not quoted there is left blank.
{caveat}

### Targets

{_targets(found)}

### Ten classes: accuracy and NLL

Accuracy with Wilson's 95 % interval, NLL with mean ± 1.96 standard errors as an interval.

{_quality(found["ten"], names)}

### Agreement with MC on five classes (figures 4 and 5)

Pearson's r with its 95 % interval, of the entropy and of the probability of airplane; first network.

{_agreement(found["agreement"]["few"], few, names)}

{_agreement(found["agreement"]["truth"], truth, names)}

### Telling novel from known classes (figures 6, 7 and 8)

AUC of the entropy with DeLong's 95 % interval.

{_novelty(found["novelty"], names)}

{_catch_up(found["by_samples"], names)}

### Filtering by entropy (figure 9)

Accuracy on the share of test images with the smallest entropy; an image of a novel class is never right.

{_filter(found["filter"], names)}

### Trainings

{_trainings(found["trainings"])}

{pictures}
"""


def _names(found: Mapping[str, Any]) -> dict[str, str]:
    return {
        "NN": "NN",
        "MC": f"MC T={found['n_samples']}",
        "paper": "MP, paper tier",
        "accurate": "MP, accurate tier",
    }


def _targets(found: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            interval(target["value"], target["interval"], 4),
            target["wanted"],
            "met" if target["met"] else "missed",
        ]
        for name, target in found["targets"].items()
    ]
    return table(["accurate tier", "value", "wanted", "target"], rows)


def _quality(by_size: Mapping[str, Any], names: Mapping[str, str]) -> str:
    rows = []
    for n in _sizes(by_size):
        for method, name in names.items():
            row = by_size[n][method]
            printed = PAPER_TEN.get(_PRINTED_AS.get(method, ""), {}) if n == "1" else {}
            rows.append(
                [
                    name,
                    n,
                    _estimate(row["accuracy"], 4),
                    _estimate(row["nll"], 3),
                    printed.get("accuracy", ""),
                    printed.get("nll", ""),
                ]
            )
    return table(["method", "networks", "accuracy", "NLL", "paper's accuracy", "paper's NLL"], rows)


def _agreement(by_method: Mapping[str, Any], reference: str, names: Mapping[str, str]) -> str:
    """Write the table of agreement with a reference, beside the paper's if the paper has that reference."""
    head = [
        f"with {reference}",
        "entropy, known",
        "entropy, novel",
        "p(airplane), known",
        "p(airplane), novel",
    ]
    few = reference == names["MC"]
    head += ["paper's entropy, known", "paper's entropy, novel"] if few else []
    rows = []
    for method, row in by_method.items():
        cells = [names[method]]
        cells += [_estimate(row[kind]["entropy_r"], 4) for kind in ("known", "novel")]
        cells += [_estimate(row[kind]["probability_r"], 4) for kind in ("known", "novel")]
        printed = PAPER_ENTROPY_R.get(_PRINTED_AS.get(method, ""), {})
        cells += [printed.get(kind, "") for kind in ("known", "novel")] if few else []
        rows.append(cells)
    return table(head, rows)


def _novelty(by_size: Mapping[str, Any], names: Mapping[str, str]) -> str:
    sizes = _sizes(by_size)
    rows = [[name, *(_estimate(by_size[n][method], 4) for n in sizes)] for method, name in names.items()]
    return table(["method", *(f"AUC, {n} network(s)" for n in sizes)], rows)


def _catch_up(by_samples: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Write the table of the T from which on sampling is as good."""
    most = by_samples["sizes"][-1]
    rows = []
    for method, size in by_samples["catch_up"].items():
        reached = f"T = {size}" if size is not None else f"not up to T = {most}"
        rows.append([names[method], reached, PAPER_CATCH_UP if method == "paper" else ""])
    return table(["method", "MC's mean AUC reaches it from", "paper's"], rows)


def _filter(by_setting: Mapping[str, Any], names: Mapping[str, str]) -> str:
    shares = ("0.25", "0.5", "0.75", "1.0")
    rows = [
        [name, setting, n, *(number(curves[n][method]["accuracy_at_coverage"][share], 4) for share in shares)]
        for setting, curves in by_setting.items()
        for n in _sizes(curves)
        for method, name in names.items()
    ]
    return table(["method", "classes", "networks", *(f"{float(s):.0%} kept" for s in shares)], rows)


def _trainings(trainings: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            str(row["epochs"]),
            str(row["best_epoch"]),
            number(row["validation_accuracy"], 4),
            number(row["validation_nll"]),
        ]
        for name, row in sorted(trainings.items())
    ]
    return table(["network", "epochs", "best epoch", "validation accuracy", "validation NLL"], rows)


def _sizes(by_size: Mapping[str, Any]) -> Sequence[str]:
    """Numbers of networks among the keys."""
    return [key for key in by_size if key.isdigit()]


def _estimate(value: Mapping[str, float], digits: int) -> str:
    return interval(value["value"], [value["low"], value["high"]], digits)
