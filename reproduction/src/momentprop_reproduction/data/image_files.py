"""CIFAR-10 as image files `train/<class>/<name>.jpg` (or .png), in a folder or in a tar archive.

Images come sorted by class and then by file name, whatever the order on the disk or in the archive.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path, PurePath

import numpy as np
from PIL import Image

from momentprop.errors import DataError
from momentprop_reproduction.data.archives import files_inside
from momentprop_reproduction.data.images import CLASSES, SHAPE, SPLITS, Decoded, checked

_SUFFIXES = (".jpg", ".jpeg", ".png")
_ADVICE = "get a new copy, or download the original pixels with `momentprop data get cifar10`"


def decode_folder(folder: Path) -> Decoded:
    """Decode `<folder>/train/<class>/*` and `<folder>/test/<class>/*`."""
    return _decode(_files(folder), folder)


def decode_tar(archive: Path) -> Decoded:
    """Decode the same from a tar archive, compressed in any way."""
    return _decode(files_inside(archive, is_image, _ADVICE), archive)


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder, sorted."""
    files = (path for split in SPLITS for path in (folder / split).glob("*/*"))
    return sorted(path for path in files if is_image(path))


def is_image(path: PurePath) -> bool:
    """Say whether the name is `.../<split>/<class>/<image>`."""
    # names with a dot in front are what file managers leave behind
    named_so = path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    return named_so and len(path.parts) >= 3 and path.parts[-3] in SPLITS


def _files(folder: Path) -> Iterator[tuple[PurePath, bytes]]:
    for path in image_files(folder):
        try:
            yield path, path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); {_ADVICE}") from error


def _decode(files: Iterator[tuple[PurePath, bytes]], source: Path) -> Decoded:
    found: dict[str, dict[tuple[int, str], np.ndarray]] = {split: {} for split in SPLITS}
    lossy = False
    for path, content in files:
        split, name = path.parts[-3], path.parts[-2]
        if name not in CLASSES:
            raise DataError(
                f"{source}: {split}/{name} is not a class of CIFAR-10 ({', '.join(CLASSES)}); {_ADVICE}"
            )
        pixels, format = _pixels(content, source, path)
        found[split][CLASSES.index(name), path.name] = pixels
        lossy |= format == "JPEG"
    splits = {split: _sorted(images, split, source) for split, images in found.items()}
    return Decoded(splits, "JPEG re-encoding" if lossy else "original pixels")


def _sorted(
    images: dict[tuple[int, str], np.ndarray], split: str, source: Path
) -> tuple[np.ndarray, np.ndarray]:
    order = sorted(images)
    pixels = np.stack([images[key] for key in order]) if order else np.empty((0, *SHAPE), np.uint8)
    labels = np.array([label for label, _ in order], dtype=np.int64)
    return checked(pixels, labels, split, source, _ADVICE)


def _pixels(content: bytes, source: Path, path: PurePath) -> tuple[np.ndarray, str | None]:
    """One image as bytes [3, 32, 32], and its format."""
    name = "/".join(path.parts[-3:])
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            if image.size == SHAPE[1:]:
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1), image.format
            # not decoded: it may be enormous
            what = f"of size {image.size[0]}x{image.size[1]}, not 32x32"
    except (OSError, ValueError, SyntaxError) as error:  # SyntaxError is pillow's for a broken PNG
        what = f"damaged or not an image ({error})"
    raise DataError(f"{source}: {name} is {what}; {_ADVICE}")
