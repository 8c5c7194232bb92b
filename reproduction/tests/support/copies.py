"""Small copies of the data sets in every layout, and a server for them."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from momentprop_reproduction.data.batches import BATCHES, FOLDER
from momentprop_reproduction.data.images import CLASSES

PER_CLASS = {"train": 5, "test": 2}


def pixels(split: str, label: int, number: int) -> np.ndarray:
    """One image [3, 32, 32]: its class and number can be told from it, even after JPEG."""
    image = np.full((3, 32, 32), 20 * label, np.uint8)
    image[1] = 40 * number
    image[2] = 200 if split == "train" else 30
    return image


def encoded(image: np.ndarray, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, format)
    return file.getvalue()


def image_files(format: str = "PNG") -> dict[str, bytes]:
    """Names and contents, in an order that is not the sorted one."""
    suffix = {"PNG": "png", "JPEG": "jpg"}[format]
    names = [(s, c, i) for s in PER_CLASS for c in range(10) for i in range(PER_CLASS[s])]
    return {
        f"{split}/{CLASSES[label]}/{i:04}.{suffix}": encoded(pixels(split, label, i), format)
        for split, label, i in reversed(names)
    }


class _Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Strings and bytes as Python 2 wrote them: without saying which of the two they are."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def _string(self, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = _string


def pickled(value: object) -> bytes:
    """A pickle as Python 2 and the numpy of its time wrote it."""
    file = io.BytesIO()
    _Python2Pickler(file, 2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch_files() -> dict[str, bytes]:
    """The files of cifar-10-batches-py: batch i has the i-th training image of each class."""
    files = {"batches.meta": pickled({"label_names": list(CLASSES), "num_vis": 3072})}
    for split, names in BATCHES.items():
        numbers = [[i] for i in range(5)] if split == "train" else [[0, 1]]
        for name, chosen in zip(names, numbers, strict=True):
            labels = [label for i in chosen for label in reversed(range(10))]
            data = [pixels(split, label, i).reshape(-1) for i in chosen for label in reversed(range(10))]
            files[name] = pickled({"batch_label": name, "labels": labels, "data": np.stack(data)})
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, f"w:{path.suffix.removeprefix('.')}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_batches(folder: Path) -> Path:
    return write(folder / FOLDER, batch_files())


def gal_folder(n: int = 20, n_splits: int = 2) -> dict[str, bytes]:
    """The text files of one UCI set: 3 features and, in the column before the last, the target."""
    generator = np.random.default_rng(0)
    table = generator.normal(size=(n, 5)).round(4)
    files = {
        "data": "\n".join(" ".join(map(str, row)) for row in table),
        "index_features": "0\n1\n2\n",
        "index_target": "3\n",
        "n_splits": f"{n_splits}\n",
        "n_hidden": "50\n",
        "n_epochs": "40\n",
        "dropout_rates": "0.005\n0.01\n",
        "tau_values": "0.1\n0.2\n0.3",
    }
    for i in range(n_splits):
        rows = generator.permutation(n)
        files[f"index_train_{i}"] = "\n".join(map(str, rows[:-2]))
        files[f"index_test_{i}"] = "\n".join(map(str, rows[-2:]))
    return {f"{name}.txt": text.encode() for name, text in files.items()}


@contextmanager
def served(files: dict[str, bytes], broken: str = "") -> Iterator[str]:
    """The address of a server on this machine; of the file `broken` it sends a half."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            if name not in files:
                self.send_error(404)
                return
            content = files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if name == broken else content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
