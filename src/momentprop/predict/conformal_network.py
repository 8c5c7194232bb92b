"""`conformal`: a network whose label sets and intervals hold the truth as often as promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from momentprop.errors import InputError
from momentprop.predict.batches import Batch, call
from momentprop.predict.class_predictive import ClassPredictive
from momentprop.predict.classification import classify
from momentprop.predict.conformal import ConformalIntervals, ConformalSets
from momentprop.predict.outputs import Select
from momentprop.predict.regression import regress
from momentprop.predict.regression_predictive import RegressionPredictive

Predictive = ClassPredictive | RegressionPredictive


@dataclass(frozen=True, eq=False)
class Conformal:
    """Predicts sets of labels, or intervals, that hold the true value with probability at least `level`.

    `calibration` is what was chosen on held-out data: `ConformalSets` or `ConformalIntervals`, which go to
    JSON and back.
    """

    network: Callable[..., Any]
    calibration: ConformalSets | ConformalIntervals
    predictive: Callable[[Any], Predictive]  # of what the network returns

    @property
    def level(self) -> float:
        return self.calibration.level

    def predict_set(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return which labels are in the set of each input, [batch, K, ...], called like the network."""
        if not isinstance(self.calibration, ConformalSets):
            raise InputError("this network was calibrated on numbers; predict_interval gives their intervals")
        return self.calibration.sets(self._predicted(*args, **kwargs))

    def predict_interval(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return both ends of the interval of each target, called like the network."""
        if not isinstance(self.calibration, ConformalIntervals):
            raise InputError("this network was calibrated on labels; predict_set gives their sets")
        return self.calibration.interval(self._predicted(*args, **kwargs))

    def _predicted(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.predictive(self.network(*args, **kwargs))

    def __repr__(self) -> str:
        kind = "label sets" if isinstance(self.calibration, ConformalSets) else "intervals"
        return f"Conformal({kind}, level={self.level}, fitted on {self.calibration.n} inputs)"


def conformal(
    network: Callable[..., Any],
    loader: Iterable[Any],
    level: float = 0.9,
    *,
    method: str = "lac",
    noise: float | Tensor = 0.0,
    select: Select = None,
    dim: int | None = None,
) -> Conformal:
    """Calibrate label sets or intervals of a network on held-out data, by split conformal prediction.

    The promise holds however wrong the network is, if the data are exchangeable with new data and the network
    has not seen them. It is about the average over inputs.

    Args:
        network: a converted network, or any other whose outputs `classify` or `regress` takes.
        loader: batches with targets, as for `validate`. Integer targets are labels and give sets, others
            give intervals.
        level: the share of sets or intervals that hold the truth, in (0, 1).
        method: `"lac"` gives the smallest sets on average, `"aps"` sets that adapt to the input.
        noise: variance of the noise in the data, for intervals: their width is proportional to the std of the
            target. `fit_noise` finds it on other data than these. The promise needs none.
        select: which of several outputs, by name or position.
        dim: the dimension of the classes, as in `classify`.

    >>> from torch import nn
    >>> import momentprop as mp
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    >>> x, labels = torch.randn(50, 4), torch.randint(3, (50,))
    >>> network = mp.convert(model, x)
    >>> sets = mp.conformal(network, [(x, labels)], level=0.9)
    >>> sets.predict_set(x[:2]).shape
    torch.Size([2, 3])
    >>> bool((sets.predict_set(x)[torch.arange(50), labels].float().mean() >= 0.9))
    True
    """
    outputs, targets = _collected(network, loader)
    y = torch.cat(targets)
    predictive: Callable[[Any], Predictive] = partial(classify, select=select, dim=dim)
    if y.is_floating_point():
        predictive = partial(regress, noise=noise, select=select)
    parts: Any = [predictive(output) for output in outputs]
    whole = type(parts[0]).cat(parts)
    if isinstance(whole, RegressionPredictive):
        return Conformal(network, ConformalIntervals.fit(whole, y, level), predictive)
    return Conformal(network, ConformalSets.fit(whole, y, level, method), predictive)


def _collected(network: Callable[..., Any], loader: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """Run the network on all batches: its outputs, and the targets."""
    if isinstance(loader, (Tensor, str, bytes, Mapping)) or not isinstance(loader, Iterable):
        raise InputError(
            f"conformal needs batches, as of a DataLoader or a list of (x, y), not a {type(loader).__name__}"
        )
    outputs, targets = [], []
    with torch.no_grad():
        for number, given in enumerate(loader):
            batch = Batch.of(given, has_target=True)
            if not isinstance(batch.target, Tensor):
                raise InputError(f"batch {number} has no target; give (x, y), or a dictionary with `labels`")
            outputs.append(call(network, batch.inputs, batch.names))
            targets.append(batch.target)
    if not outputs:
        raise InputError("there is no data to calibrate on: the loader gave no batch")
    return outputs, targets
