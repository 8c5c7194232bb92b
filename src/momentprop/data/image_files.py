"""CIFAR-10 as image files `train/<class>/<name>.jpg` (or .png), in a folder or in a tar archive.

Images come sorted by class and then by file name, whatever the order on the disk or in the archive.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from momentprop.data.images import CLASSES, SHAPE, SPLITS, Decoded, checked
from momentprop.errors import DataError, MissingExtraError

_JPEG, _PNG = (".jpg", ".jpeg"), (".png",)
_ADVICE = "get a new copy, or download the original pixels with `momentprop data get cifar10`"


def decode_folder(folder: Path) -> Decoded:
    """Decode `<folder>/train/<class>/*` and `<folder>/test/<class>/*`."""
    return _decode(_files(folder), folder)


def decode_tar(archive: Path) -> Decoded:
    """Decode the same from a tar archive, compressed in any way; nothing is extracted to the disk."""
    return _decode(_members(archive), archive)


def listing(folder: Path) -> list[Path]:
    """The image files of a folder, sorted."""
    return sorted(
        path
        for split in SPLITS
        for path in (folder / split).glob("*/*")
        if _is_image(PurePosixPath(path.as_posix()))
    )


def _is_image(path: PurePosixPath) -> bool:
    # names with a dot in front are what file managers leave behind
    return path.suffix.lower() in _JPEG + _PNG and not path.name.startswith(".")


def _files(folder: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    for path in listing(folder):
        try:
            yield PurePosixPath(path.as_posix()), path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); {_ADVICE}") from error


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if member.isfile() and len(path.parts) >= 3 and path.parts[-3] in SPLITS and _is_image(path):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield path, file.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or incomplete ({error}); {_ADVICE}") from error


def _decode(files: Iterator[tuple[PurePosixPath, bytes]], source: Path) -> Decoded:
    found: dict[str, dict[tuple[int, str], np.ndarray]] = {split: {} for split in SPLITS}
    lossy = False
    for path, content in files:
        split, name = path.parts[-3], path.parts[-2]
        if name not in CLASSES:
            raise DataError(
                f"{source}: {split}/{name} is not a class of CIFAR-10 ({', '.join(CLASSES)}); {_ADVICE}"
            )
        found[split][CLASSES.index(name), path.name] = _pixels(content, source, path)
        lossy |= path.suffix.lower() in _JPEG
    splits = {}
    for split, images in found.items():
        order = sorted(images)
        labels = np.array([label for label, _ in order], dtype=np.int64)
        pixels = np.stack([images[key] for key in order]) if order else np.empty((0, *SHAPE), np.uint8)
        splits[split] = checked(pixels, labels, split, source, _ADVICE)
    return Decoded(splits, "JPEG re-encoding" if lossy else "original pixels")


def _pixels(content: bytes, source: Path, path: PurePosixPath) -> np.ndarray:
    """One image as bytes [3, 32, 32]."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "data") from error
    name = "/".join(path.parts[-3:])
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            size = image.size
            # a size that is wrong is not worth decoding: it may be enormous
            pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1) if size == SHAPE[1:] else None
    except (OSError, ValueError, SyntaxError) as error:  # SyntaxError is pillow's for a broken PNG
        raise DataError(f"{source}: {name} is damaged or not an image ({error}); {_ADVICE}") from error
    if pixels is None:
        raise DataError(f"{source}: {name} is of size {size[0]}x{size[1]}, not 32x32; {_ADVICE}")
    return pixels
