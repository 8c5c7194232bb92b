"""mp.compile_package: machine code that gives the same numbers and starts without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import momentprop as mp
from small import mlp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler on this machine"
)


@needs_compiler
def test_a_package(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    path = tmp_path / "model.pt2"
    metadata = mp.compile_package(bnn, path, note="compiled")
    assert (metadata.kind, metadata.fidelity) == ("aoti", "accurate")
    assert mp.inspect(path) == metadata
    with pytest.raises(mp.ArchiveError, match="machine_code=True"):
        mp.load(path)
    loaded = mp.load(path, machine_code=True)
    assert loaded.metadata.note == "compiled"
    with torch.no_grad():
        for batch in (1, 3, 50):
            x = torch.randn(batch, 4)
            found, wanted = loaded(x), bnn(x)
            torch.testing.assert_close(found.mean, wanted.mean)
            torch.testing.assert_close(found.covariance, wanted.covariance)
    with pytest.raises(mp.InputError, match="shape"):
        loaded(torch.zeros(3, 5))
    with pytest.raises(mp.MomentpropError, match="cannot be moved"):
        loaded.to("meta")
    code = f"""
import sys, torch, momentprop as mp
mp.load({str(path)!r}, machine_code=True)(torch.zeros(2, 4))
late = [name for name in ("torch._inductor.codecache", "torch._dynamo", "sympy") if name in sys.modules]
assert not late, late
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # nothing that compiles is even imported
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x20
    path.write_bytes(content)
    with pytest.raises(mp.ArchiveError, match="damaged"):
        mp.load(path, machine_code=True)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor
    from torch._inductor.exc import InvalidCxxCompiler

    def refuse(*args: object, **kwargs: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    bnn = mp.convert(mlp(), X, "paper")
    with pytest.raises(mp.ExportError, match=r"install g\+\+ or clang\+\+"):
        mp.compile_package(bnn, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"\.pt2"):
        mp.compile_package(bnn, tmp_path / "model.so")
