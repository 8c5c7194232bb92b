"""What is installed, and what the package promises."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import momentprop as mp
from momentprop.rules.registry import RULES

ROOT = Path(__file__).parents[1]


def test_version_and_type_marker() -> None:
    assert mp.__version__ == metadata.version("momentprop")
    assert (Path(mp.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(
    torch.version.cuda is not None and not os.environ.get("CI"),
    reason="this torch is a CUDA build of the user's own",
)
def test_the_pinned_set_up_pulls_no_cuda_packages() -> None:
    names = {(d.metadata["Name"] or "").lower() for d in metadata.distributions()}
    assert not {n for n in names if n.startswith(("nvidia-", "triton"))}


def test_the_core_imports_without_the_extras() -> None:
    """With every optional package hidden, import, convert and sample still work."""
    code = """
import sys
for name in ("numpy", "typer", "rich", "matplotlib", "sklearn"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import torch, momentprop as mp
model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
x = torch.ones(2, 4)
assert mp.convert(model, x)(x).variance.min() > 0
assert mp.monte_carlo(model, x, n_samples=3).mean.shape == (2, 2)
try:
    mp.monte_carlo(model, x, n_samples=3, progress=True)
except ImportError as error:
    assert "pip install 'momentprop[cli]'" in str(error), error
else:
    raise SystemExit("rich is hidden but the progress bar worked")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# these take arguments and serve until they are stopped: tests/examples/test_serve.py
SERVICES = ("serve.py", "load_test.py")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in SERVICES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run(example: Path) -> None:
    subprocess.run([sys.executable, example], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("page", ["README.md", "docs/rules.md", "docs/guide.md", "docs/validate.md"])
def test_code_in_the_documentation_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks of one page run in order, in one namespace."""
    text = (ROOT / page).read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert blocks
    monkeypatch.chdir(tmp_path)  # where pages write their files
    namespace: dict[str, object] = {"__name__": page}
    rules = dict(RULES._rules)
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
    finally:
        RULES._rules = rules
