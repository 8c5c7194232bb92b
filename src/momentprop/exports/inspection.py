"""`inspect`: what a file says about itself."""

from __future__ import annotations

import os
from pathlib import Path

from momentprop.exports.archive import read_description
from momentprop.exports.metadata import Metadata
from momentprop.exports.onnx import read_onnx_metadata


def inspect(path: str | os.PathLike[str]) -> Metadata:
    """The description in a file of `save`, `compile_package` or `export_onnx`; the network is not loaded.

    Of the first two the checksums are verified as well.
    """
    return read_onnx_metadata(path) if Path(path).suffix == ".onnx" else read_description(path)
