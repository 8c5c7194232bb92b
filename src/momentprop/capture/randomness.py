"""Random numbers of this thread's own: the generators that all threads share are left alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from momentprop.graph.private import OpOverload


class OwnNumbers(TorchDispatchMode):
    """Makes operators draw from generators of its own, the same numbers every time.

    The few that take no generator draw from the shared one, which is put back after each of them.
    """

    supports_higher_order_operators = True  # such as torch.cond, which draws nothing itself

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile, which torch.cond calls, from noting for good that this function is skipped."""
        return True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draws = 0  # operators that did draw
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        takes = _with_generator(func)
        if takes is None:
            return self._from_shared(func, args, kwargs)
        if kwargs.get("generator") is not None:  # the model's own
            return func(*args, **kwargs)
        device = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
        if torch.device(device).type == "meta":  # no values, no numbers
            return func(*args, **kwargs)
        generator = self._generator(torch.device(device))
        before = generator.get_state()
        drawn = takes(*args, **kwargs, generator=generator)
        self.draws += not torch.equal(before, generator.get_state())
        return drawn

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def _from_shared(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + self.draws)
            before = torch.get_rng_state()
            drawn = func(*args, **kwargs)
            self.draws += not torch.equal(before, torch.get_rng_state())
            return drawn


def _with_generator(op: OpOverload) -> OpOverload | None:
    """The overload of the operator that takes a generator beside the same arguments."""
    own = _named(op)
    if "generator" in own:
        return op
    packet = op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    return next((other for other in others if _named(other) == [*own, "generator"]), None)


def _named(op: OpOverload) -> list[str]:
    """Name the operator's arguments; generators are last, where calls do not name them by position."""
    return sorted((a.name for a in op._schema.arguments), key=lambda name: name == "generator")
