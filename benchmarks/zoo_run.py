"""Every network of the catalogue in a process of its own, results kept. Used by zoo.py and onnx_zoo.py."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from multiprocessing import get_context as new_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import momentprop as mp

Result = dict[str, Any]  # at least a status; of what went wrong outside of the examination, a cause


@dataclass(frozen=True)
class Question:
    """What is asked of every network, and how its answers are kept."""

    text: str
    examine: Callable[[str], Result]
    good: str  # the status of networks that need not run again
    line: Callable[[str, Result], str]
    left_out: tuple[str, ...] = ()  # of the file: they name places of this machine
    header: Mapping[str, Any] | None = None


def add_arguments(parser: argparse.ArgumentParser, limit: float, out: Path) -> None:
    parser.add_argument("--only", nargs="+", metavar="NAME", help="networks whose names contain one of these")
    parser.add_argument("--limit", type=float, default=limit, help=f"seconds per network (default {limit:g})")
    parser.add_argument("--workers", type=int, default=1, help="networks at a time (default 1)")
    parser.add_argument("--fidelity", default="auto", help="tier (default auto)")
    parser.add_argument("--all", action="store_true", help="run again what is in the file already")
    parser.add_argument("--out", type=Path, default=out)


def run_all(question: Question, zoo: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Result]:
    """All results in the order of the catalogue; the file is written after every network."""
    results: dict[str, Result] = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    chosen, commit = choose(zoo, args.only), _commit()
    again = args.only or args.all
    named = [name for name in chosen if again or results.get(name, {}).get("status") != question.good]
    for name, result in run_each(named, question.examine, args.limit, args.workers):
        results[name] = result | commit
        place = f"[{chosen.index(name) + 1}/{len(chosen)}]"
        print(f"{place} {question.line(name, results[name])}", file=sys.stderr, flush=True)
        _write(results, question, args.out)
    return {name: results[name] for name in zoo if name in results}


def _commit() -> Result:
    """Of this code: results in one file may be of several states."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run(asked, capture_output=True, text=True, check=True)
        return {"commit": found.stdout.strip()}
    return {}


def choose(zoo: Mapping[str, Any], only: Iterable[str] | None) -> list[str]:
    """Those that are named, or all; without those whose package is missing, which is said."""
    named = [name for name in zoo if not only or any(part in name for part in only)]
    missing: dict[str, int] = {}
    for name in named:
        package = zoo[name].needs
        if package and importlib.util.find_spec(package) is None:
            missing[package] = missing.get(package, 0) + 1
    for package, count in missing.items():
        print(f"{count} networks skipped: {package} is not installed", file=sys.stderr)
    return [name for name in named if zoo[name].needs not in missing]


def run_each(
    names: Sequence[str], examine: Callable[[str], Result], limit: float, workers: int = 1
) -> Iterator[tuple[str, Result]]:
    """Every network in a process of its own, so many at a time: a crash or a hang loses nothing else."""
    waiting, running = list(reversed(names)), dict[Any, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _Running(waiting.pop(), examine, limit)
                running[started.receive] = started
            left = min(one.deadline for one in running.values()) - time.perf_counter()
            wait(list(running), max(left, 0.0))
            for receive, one in list(running.items()):
                if (result := one.result()) is not None:
                    one.stop()
                    del running[receive]
                    yield one.name, result
    finally:  # after Ctrl-C too
        for one in running.values():
            one.stop()


class _Running:
    """The process that examines one network."""

    def __init__(self, name: str, examine: Callable[[str], Result], limit: float) -> None:
        # a fork has everything imported already, as it was when the run began
        context: Any = new_context("fork" if "fork" in get_all_start_methods() else "spawn")
        self.receive, send = context.Pipe(duplex=False)
        self.name, self.limit, self.start = name, limit, time.perf_counter()
        self.process = context.Process(target=_work, args=(send, examine, name))
        self.process.start()
        send.close()

    @property
    def deadline(self) -> float:
        return self.start + self.limit

    def result(self) -> Result | None:
        """None while it runs."""
        try:
            if self.receive.poll():
                found: Result = self.receive.recv()
                return found | {"seconds": round(time.perf_counter() - self.start, 1)}
        except EOFError:
            self.process.join()
            return {"status": "crash", "cause": f"exit code {self.process.exitcode}"}
        if time.perf_counter() < self.deadline:
            return None
        return {"status": "time limit", "cause": f"more than {self.limit:.0f} s"}

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.receive.close()


def _work(send: Any, examine: Callable[[str], Result], name: str) -> None:
    torch.set_num_threads(1)
    send.send(examine(name))


def title() -> str:
    return f"{platform.machine()}, 1 thread, torch {torch.__version__}, momentprop {mp.__version__}"


def _write(results: Mapping[str, Result], question: Question, out: Path) -> None:
    """Whole or not at all: hours of results are in the file that it replaces."""
    header = {
        "question": question.text,
        "machine": platform.machine(),
        "threads": 1,
        **(question.header or {}),
        "versions": {"momentprop": mp.__version__, "torch": torch.__version__},
    }
    kept = {
        name: {k: v for k, v in result.items() if k not in question.left_out}
        for name, result in results.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(header | {"networks": kept}, indent=1) + "\n")
    part.replace(out)
