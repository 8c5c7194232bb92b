"""What import-linter's contracts in pyproject.toml cannot say about the layout of the library."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "momentprop"
FILES = sorted(PACKAGE.rglob("*.py"))
REPRODUCTION = sorted((ROOT / "reproduction" / "src").rglob("*.py"))
NEED_MORE = ("cli", "plots.py")  # than torch, by way of extras


def test_few_modules_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 14, "put the new module into the package of its concept"


@pytest.mark.parametrize("path", [*FILES, *REPRODUCTION], ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_stay_in_their_file(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("momentprop"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert set(private) <= {"__version__"}, f"{path.name} imports {private} of {node.module}"


def test_the_core_needs_torch_alone() -> None:
    """Where no extra is declared, nothing but torch and the standard library is imported at the top."""
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in NEED_MORE:
            continue
        for node in ast.parse(path.read_text()).body:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                top = module.split(".")[0]
                known = top in ("torch", "momentprop") or top in sys.stdlib_module_names
                assert known, f"{path.name} imports {module}"
