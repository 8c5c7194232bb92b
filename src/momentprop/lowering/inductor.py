"""Sets how converted networks are compiled, where the user does not say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

# Products and sums in one rounding, as BLAS and oneDNN have them: moments are polynomials for the most part.
OPTIONS: Mapping[str, Any] = MappingProxyType({"cpp.enable_floating_point_contract_flag": "fast"})


class Compiled(nn.Module):
    """Modules whose `compile` knows what is good for moments."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.nn.Module.compile`: calls from now on run compiled. Takes the arguments of `torch.compile`.

        Inductor fuses multiplications and additions here; `options` that are given come first.
        """
        if kwargs.get("backend", "inductor") == "inductor" and kwargs.get("mode") is None:
            kwargs["options"] = {**OPTIONS, **(kwargs.get("options") or {})}
        super().compile(*args, **kwargs)
