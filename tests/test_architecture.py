"""The layout: a module imports only from those above it; every rule file has its test file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "momentprop"

# Each may import from those before it, and from nothing after it.
ORDER = [
    "version",
    "errors",
    "threads",
    "inductor",
    "checks",
    "insertion",
    "records",
    "moments",
    "gaussian",
    "operators",
    "piecewise",
    "quadrature",
    "logistic",
    "analytic",
    "positive",
    "local",
    "neighbours",
    "shared",
    "channel_sums",
    "registry",
    "rules.families",
    "rules",
    "logits",
    "structure",
    "free_batch",
    "flat_export",
    "nodes",
    "stems",
    "attention",
    "expansions",
    "functionalize",
    "noise",
    "marked",
    "idle",
    "arming",
    "layerdrop",
    "agreement",
    "exporting",
    "normalize",
    "trace",
    "samples",
    "selection",
    "unpooling",
    "patterns",
    "rewrite",
    "coverage",
    "recurrent",
    "draws",
    "dropconnect",
    "decompose",
    "probes",
    "site",
    "fallback",
    "linearized",
    "sampled",
    "unsupported",
    "propagate",
    "sources",
    "tape",
    "tracking",
    "sketch",
    "fused",
    "pairs",
    "jump",
    "dropped_pool",
    "derive",
    "calls",
    "paths",
    "adjoint",
    "per_sample",
    "summary",
    "pooled_convolutions",
    "rectified",
    "frozen",
    "convert",
    "sampler",
    "montecarlo",
    "ensemble",
    "predictive",
    "lattice",
    "regression",
    "estimates",
    "metrics",
    "conformal",
    "temperature",
    "decisions",
    "exports",
    "exports.outline",
    "exports.interface",
    "exports.heads",
    "exports.plain_names",
    "exports.program",
    "exports.rounding",
    "exports.metadata",
    "exports.graph_check",
    "exports.guard",
    "exports.loaded",
    "exports.archive",
    "exports.aoti",
    "exports.onnx_types",
    "exports.onnx_decompose",
    "exports.onnx_names",
    "exports.onnx_operators",
    "exports.onnx_phases",
    "exports.onnx_runtime",
    "exports.verification",
    "exports.onnx",
    "exports.inspection",
    "plots",
    "validation",
    "validation.equivalence",
    "validation.inputs",
    "validation.interruption",
    "validation.outputs",
    "validation.tiers",
    "validation.sampling",
    "validation.figures",
    "validation.latency",
    "validation.layers",
    "validation.verdict",
    "validation.findings",
    "validation.comparison",
    "validation.charts",
    "validation.markup",
    "validation.page",
    "validation.report",
    "validation.validate",
    "",  # the public names
    "data",
    "experiments",
    "benchmarking",
    "benchmarking.turns",
    "benchmarking.methods",
    "benchmarking.subject",
    "benchmarking.work",
    "benchmarking.programs",
    "benchmarking.sampling",
    "benchmarking.runtimes",
    "benchmarking.memory",
    "benchmarking.rows",
    "benchmarking.run",
    "benchmarking.figure",
    "cli",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def level_of(name: str) -> int:
    """The position of the longest known prefix."""
    parts = name.split(".") if name else []
    for n in range(len(parts), -1, -1):
        prefix = ".".join(parts[:n])
        if prefix in ORDER and (prefix or not parts):
            return ORDER.index(prefix)
    raise AssertionError(f"{name} has no place in ORDER: add it, in the right place")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name.removeprefix("momentprop").removeprefix(".") for name in found if name.startswith("momentprop")
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_upwards(path: Path) -> None:
    mine = level_of(name_of(path))
    for imported in imports_of(path):
        known = [m for m in map(name_of, FILES) if imported == m or imported.startswith(f"{m}.")]
        target = max(known, key=len)
        assert level_of(target) <= mine, f"{name_of(path)} imports {target}, which stands below it"


def test_every_rule_file_has_a_test_file_and_the_other_way_round() -> None:
    rules = {p.stem for p in (PACKAGE / "rules").glob("*.py")} - {"__init__"}
    tests = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "rules").glob("test_*.py")}
    assert rules == tests


def test_the_core_needs_torch_alone() -> None:
    """Outside cli, data, experiments and plots nothing but torch and the standard library is imported."""
    allowed = {"torch", "momentprop", "__future__"}
    import sys

    for path in FILES:
        if name_of(path).split(".")[0] in ("cli", "data", "experiments", "plots"):
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                top = module.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {module}"
