"""`save`, `compile_package`, `load`: a converted network as one file, with a description.

What `save` writes is a torch.export archive. It needs no class of the model's, and reading it unpickles
nothing: weights are plain bytes, the graph is JSON. It is also an archive like any other: where momentprop is
imported, for its operators, `torch.export.load` gives a program on flat tensors.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import os
import secrets
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from momentprop.errors import ArchiveError, ExportError
from momentprop.exports.guard import check_harmless, checksums, member_names, read_metadata
from momentprop.exports.interface import name_moments
from momentprop.exports.loaded import LoadedNetwork, PackagedProgram
from momentprop.exports.metadata import MEMBER, Metadata, as_report
from momentprop.exports.outline import Outline
from momentprop.exports.plain_names import use_plain_names
from momentprop.exports.program import Program, program_of
from momentprop.graph import private
from momentprop.lowering.flat_export import quiet
from momentprop.lowering.inductor import OPTIONS
from momentprop.network import BayesianNetwork


def save(
    network: nn.Module,
    path: str | os.PathLike[str],
    *,
    note: str = "",
    preprocessing: str = "",
    report: Any = None,
) -> Metadata:
    """Write a converted network to one file that `load` reads without the model's code.

    Args:
        network: what `convert` or `load` gave.
        path: the file, by convention ending in `.pt2`.
        note: anything about it, for those who meet the file.
        preprocessing: what callers must do to their inputs first, in words.
        report: how close it is to sampling: a dictionary, or something with `to_dict`.

    Returns:
        What the file says about itself.

    >>> import tempfile, torch, momentprop as mp
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = mp.save(mp.convert(model, torch.zeros(1, 4)), f"{folder}/model.pt2", note="untrained")
    ...     again = mp.load(f"{folder}/model.pt2")
    >>> again(torch.randn(16, 4)).covariance.shape, again.metadata.note
    (torch.Size([16, 3, 3]), 'untrained')
    """
    program, structure = moments_program(network)
    metadata = describe("pt2", network, program, note, preprocessing, report, structure=structure)
    use_plain_names(program.exported)
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program.exported, buffer)
    try:
        with zipfile.ZipFile(buffer) as archive:
            check_harmless(archive)
    except ArchiveError as error:
        raise ExportError(f"no file of this network could be loaded again: {error}") from None
    with written(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())
        return seal(temporary, metadata)


def compile_package(
    network: nn.Module,
    path: str | os.PathLike[str],
    *,
    note: str = "",
    preprocessing: str = "",
    report: Any = None,
) -> Metadata:
    """Compile a converted network with AOTInductor into a `.pt2` package that `load` reads.

    It takes a C++ compiler and minutes for deep networks, once. The package runs with the same version of
    torch, on processors that have the instructions of this one, for any batch size. Note, preprocessing and
    report are as for `save`.
    """
    program, structure = moments_program(network)
    metadata = describe("aoti", network, program, note, preprocessing, report, structure=structure)
    exported = program.exported
    exported._example_inputs = (tuple(program.examples()), {})
    with written(path) as temporary:
        if temporary.suffix != ".pt2":
            raise ValueError(f"torch names its packages .pt2, but the path is {path}")
        try:
            with quiet(), torch.no_grad():
                private.compile_package(exported, os.fspath(temporary), OPTIONS)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if "InvalidCxxCompiler" in said:
                raise ExportError(
                    "no C++ compiler was found: install g++ or clang++, or name one in the variable CXX"
                ) from error
            raise ExportError(f"AOTInductor cannot compile the network: {said}") from error
        return seal(temporary, metadata)


def load(path: str | os.PathLike[str], *, machine_code: bool = False) -> LoadedNetwork:
    """Read a file that `save` or `compile_package` wrote: a module called like the converted network.

    A file of `save` executes nothing but the network's operators, whoever wrote it. A compiled package *is*
    machine code, and is loaded only with `machine_code=True`: if you trust who made it.
    """
    metadata, content = _read(path)
    if metadata.kind == "aoti":
        if not machine_code:
            raise ArchiveError(
                f"{path} is machine code: if you trust who made it, load(path, machine_code=True); on the "
                "command line, --machine-code"
            )
        return LoadedNetwork(PackagedProgram(path, content.getbuffer(), metadata), metadata)
    if metadata.kind != "pt2":
        raise ArchiveError(f"{path} is of the kind {metadata.kind!r}, which this version cannot load")
    with _damage(path), zipfile.ZipFile(content) as archive:
        check_harmless(archive)
    content.seek(0)
    try:
        with quiet():
            # torch.export.load would go on with older formats, which are pickles
            from torch.export.pt2_archive._package import load_pt2

            return LoadedNetwork(load_pt2(content).exported_programs["model"], metadata)
    except ArchiveError:
        raise
    except Exception as error:
        raise ArchiveError(
            f"{path} was written with torch {metadata.torch}, and torch {torch.__version__} cannot read it: "
            f"{error}"
        ) from error


def read_description(path: str | os.PathLike[str]) -> Metadata:
    """Verify the checksums of a file and return what it says about itself; nothing in it is loaded."""
    return _read(path)[0]


def moments_program(network: nn.Module) -> tuple[Program, Outline]:
    """Return the network on flat tensors, and the structure of what it returns."""
    structures: list[Outline] = []

    def head(output: Any) -> dict[str, Tensor]:
        named, structure = name_moments(output, everything=True)
        structures.append(structure)
        return named

    return program_of(network, head), structures[-1]


def describe(
    kind: str, network: nn.Module, program: Program, note: str, preprocessing: str, report: Any, **more: Any
) -> Metadata:
    """The description of a file of this network. What a loaded network says of itself is kept."""
    known = getattr(network, "metadata", None)
    summary = network.summary().head if isinstance(network, BayesianNetwork) else ""
    if isinstance(known, Metadata):
        note, preprocessing, summary = note or known.note, preprocessing or known.preprocessing, known.summary
        report = known.report if report is None else report
    device = next((str(t.device) for t in network.state_dict().values()), "cpu")
    texts = {"note": str(note), "preprocessing": str(preprocessing), "report": as_report(report)}
    return Metadata.of(kind, program, **texts, summary=summary, device=device, **more)


def seal(path: Path, metadata: Metadata) -> Metadata:
    """Add the description to an archive, with the checksums of all it holds."""
    with zipfile.ZipFile(path, "a") as archive:
        sealed = dataclasses.replace(metadata, sha256=checksums(archive))
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/{MEMBER}", sealed.to_json())
    return sealed


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if nothing fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent}")
    temporary = target.with_name(f".{target.stem}-{secrets.token_hex(8)}{target.suffix}")
    # unlike those of tempfile, with the permissions of any new file
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: str | os.PathLike[str]) -> tuple[Metadata, io.BytesIO]:
    """The description of a whole file, and its members in a new archive.

    Readers of zip files differ in what they find in one that is made for it. Torch gets the new archive, so
    that what is checked is what is loaded.
    """
    content = io.BytesIO()
    with open(path, "rb") as file, _damage(path):
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile:
            raise ArchiveError(f"{path} is truncated, or no file that mp.save wrote") from None
        with archive, zipfile.ZipFile(content, "w") as new:
            for name in member_names(archive):
                new.writestr(name, archive.read(name))
    with _damage(path), zipfile.ZipFile(content) as archive:
        return read_metadata(archive), content


@contextmanager
def _damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise our error for whatever goes wrong with a damaged file: zip files raise about everything."""
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:
        raise ArchiveError(f"{path} is damaged: {error!r}") from None


def _reduced(network: BayesianNetwork) -> tuple[Any, ...]:
    """Pickle a network as the bytes of its archive, for other processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.pt2")
        save(network, path)
        return _restored, (path.read_bytes(),)


def _restored(content: bytes) -> LoadedNetwork:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.pt2")
        path.write_bytes(content)
        return load(path)


copyreg.pickle(BayesianNetwork, _reduced)
