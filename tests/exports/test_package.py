"""mp.compile_package: machine code that gives the same numbers and starts without a compiler."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[mp.BayesianNetwork, Path]:
    bnn = mp.convert(mlp(), X)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    mp.compile_package(bnn, path, note="compiled")
    return bnn, path


@needs_compiler
def test_a_package(package: tuple[mp.BayesianNetwork, Path], tmp_path: Path) -> None:
    bnn, path = package
    metadata = mp.inspect(path)
    assert (metadata.kind, metadata.fidelity) == ("aoti", "accurate")
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
    damaged = tmp_path / "model.pt2"
    damaged.write_bytes(content)
    with pytest.raises(mp.ArchiveError, match="damaged"):
        mp.load(damaged, machine_code=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_without_python(package: tuple[mp.BayesianNetwork, Path], tmp_path: Path) -> None:
    """examples/package.cpp, built as it says."""
    bnn, path = package
    source = Path(__file__).parents[2] / "examples" / "package.cpp"
    torch_folder, program = Path(torch.__path__[0]), tmp_path / "package"
    library = torch_folder / "lib"
    flags = [f"-I{torch_folder / 'include'}", f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", "-std=c++20", source, "-o", program, *flags], check=True)
    ran = subprocess.run([program, path, "2", "4"], check=True, capture_output=True, text=True)
    *outputs, times = ran.stdout.splitlines()
    with torch.no_grad():
        wanted = bnn(torch.zeros(2, 4))
    for line, tensor in zip(outputs, (wanted.mean, wanted.variance, wanted.covariance), strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), tensor.flatten())
    assert times.startswith("loaded after")
    refused = subprocess.run([program, tmp_path / "none.pt2", "2", "4"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("package: ")


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
