"""Finds who draws from the generators of Python and numpy, which all threads share.

Their states tell that somebody drew. Whether it was this thread is found by watching its calls: those of
Python's generator one by one; of numpy's, whose calls are not seen, the functions that name it.
"""

from __future__ import annotations

import contextlib
import linecache
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, cast

from momentprop.graph.place import TORCH
from momentprop.graph.private import import_tracer

Place = tuple[str, int]  # file and line
States = dict[str, bytes]  # of each generator, before somebody drew from it

_SINGLE = {"rand", "random", "random_sample", "uniform"}  # what branches are decided by, in numpy.random


@contextlib.contextmanager
def drew_meanwhile() -> Iterator[States]:
    """Collect the generators that anybody draws from, with their states before."""
    before, found = _states(), States()
    try:
        yield found
    finally:
        after = _states()
        found.update({name: state for name, state in before.items() if after[name] != state})


@contextlib.contextmanager
def own_draws(before: States | None = None) -> Iterator[list[Place]]:
    """Collect the lines where this thread draws single numbers, and put the generators back where it did."""
    import_tracer()
    states = {**_states(), **(before or {})}
    python: list[Place] = []
    numpy: list[Place] = []
    outer = sys.getprofile()
    found: list[Place] = []
    sys.setprofile(_watch(python, numpy))
    try:
        yield found
    finally:
        sys.setprofile(outer)
        now = _states()
        drawn = {"random": python, "numpy": [] if now.get("numpy") == states.get("numpy") else numpy}
        found += [*drawn["random"], *drawn["numpy"]]
        if drawn["random"]:
            random.setstate(pickle.loads(states["random"]))
        if drawn["numpy"]:
            sys.modules["numpy"].random.set_state(pickle.loads(states["numpy"]))


def _states() -> States:
    numpy = sys.modules.get("numpy.random")
    states = {"random": pickle.dumps(random.getstate())}
    return states | {"numpy": pickle.dumps(numpy.get_state())} if numpy else states


def _watch(python: list[Place], numpy: list[Place]) -> Callable[[FrameType, str, Any], None]:
    known: dict[CodeType, Place | None] = {}

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            if getattr(called, "__self__", None) is _GENERATOR and called.__name__ == "random":
                caller: FrameType | None = frame
                while caller is not None and caller.f_code.co_filename == random.__file__:
                    caller = caller.f_back
                if caller is not None and not caller.f_code.co_filename.startswith(TORCH):
                    python.append((caller.f_code.co_filename, caller.f_lineno))
        elif event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = _draws_of_numpy(code, frame.f_globals)
            place = known[code]
            if place is not None:
                numpy.append(place)

    return watch


_GENERATOR = cast(Any, random.random).__self__


def _draws_of_numpy(code: CodeType, variables: dict[str, Any]) -> Place | None:
    """The line of a function where it names numpy's generator, to draw a single number."""
    numpy: Any = sys.modules.get("numpy")
    names = set(code.co_names)
    if numpy is None or code.co_filename.startswith(TORCH) or not names & _SINGLE:
        return None
    values = [variables[name] for name in names if name in variables]
    own = numpy.random.rand.__self__
    holds = "numpy" in names or any(
        value is numpy or value is numpy.random or getattr(value, "__self__", None) is own for value in values
    )
    others = names & set(dir(numpy.random)) - _SINGLE  # seeded permutations are no branches
    if not holds or others:
        return None
    lines = sorted({line for *_, line in code.co_lines() if line})
    texts = {line: linecache.getline(code.co_filename, line) for line in lines}
    line = next((line for line in lines if any(name in texts[line] for name in _SINGLE)), lines[0])
    return code.co_filename, line
