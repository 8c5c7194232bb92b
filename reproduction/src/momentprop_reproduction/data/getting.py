"""Downloads a set by its name."""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from momentprop_reproduction.data.catalogue import CIFAR10, CIFAR10_FILE, SETS, known
from momentprop_reproduction.data.download import Progress, download, fetch, verify
from momentprop_reproduction.data.location import download_folder
from momentprop_reproduction.data.storing import write_arrays
from momentprop_reproduction.data.uci import gal_files, read_gal_folder

_CONNECTIONS = 4  # a UCI set is some fifty small files


def get(
    name: str, folder: Path | None = None, url: str | None = None, progress: Progress | None = None
) -> Path:
    """Download a set to `folder` (default: the downloads) and return its file. `url` is that of a mirror."""
    known([name])
    folder = download_folder() if folder is None else folder
    url = url or SETS[name].url
    if name == CIFAR10:
        path = folder / CIFAR10_FILE
        download(url, path, SETS[name].sha256, progress)
    else:
        path = folder / "uci" / f"{name}.npz"
        _get_uci(name, path, url, progress)
    return path


def _get_uci(name: str, path: Path, url: str, progress: Progress | None) -> None:
    """The text files of Gal's repository, verified, and kept as one .npz file."""
    files = sorted(gal_files(SETS[name].n_splits))
    lines = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(_CONNECTIONS) as pool:
        contents = pool.map(fetch, [f"{url}/{file}" for file in files])
        for file, content in zip(files, contents, strict=True):
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {file}\n")
            (Path(temporary) / file).write_bytes(content)
            if progress:
                progress(len(content))
        verify(url, hashlib.sha256("".join(lines).encode()).hexdigest(), SETS[name].sha256)
        write_arrays(path, read_gal_folder(Path(temporary)), compressed=True)
