"""What does uncertainty cost a service? Requests per second and p99, beside the plain network.

Exports the paper's CNN (random weights; times do not depend on them) as it is and converted, serves each file
with examples/serve.py on this machine's loopback address, one after the other in turns, and sends requests
from several clients. Bounded in time; everything it starts it also stops.

    python examples/load_test.py [--seconds 5] [--clients 4] [--images 1 8] [--tiers fast] [--out load.json]

The network comes from momentprop-reproduction: pip install ./reproduction
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import math
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import momentprop as mp
from momentprop.exports.onnx_runtime import silent_exporter
from momentprop_reproduction.paper_network import network

SERVER = Path(__file__).with_name("serve.py")
SHAPE = (3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every network")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8], help="in a request")
    parser.add_argument("--tiers", nargs="+", default=["fast", "accurate"])
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = export(Path(folder), args.tiers)
        for images in args.images:
            found: dict[str, dict[str, Any]] = {name: {"seconds": [], "spent": 0.0} for name in files}
            for _ in range(args.rounds):
                for name, path in files.items():
                    with Server(path, args.threads) as port:
                        spent, seconds = load(port, images, args.clients, args.seconds)
                    found[name]["seconds"] += seconds
                    found[name]["spent"] += spent
            rows += summarize(images, found)
    header = ("images", "network", "requests/s", "of plain", "median ms", "p99 ms", "of plain")
    print(" ".join(f"{title:>10}" for title in header))
    for row in rows:
        cells = (row["images"], row["network"], f"{row['requests_per_second']:.0f}")
        cells += (f"{row['rate_ratio']:.2f}", f"{1e3 * row['median']:.1f}", f"{1e3 * row['p99']:.1f}")
        print(" ".join(f"{cell:>10}" for cell in (*cells, f"{row['p99_ratio']:.2f}")))
    if args.out:
        options = {key: value for key, value in vars(args).items() if key != "out"}
        args.out.write_text(json.dumps({"options": options, "rows": rows}, indent=1) + "\n")


def export(folder: Path, tiers: list[str]) -> dict[str, Path]:
    torch.manual_seed(0)
    model, x = network(10).eval(), torch.randn(2, *SHAPE)
    with silent_exporter():
        made = torch.onnx.export(
            model, (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False
        )
    assert made is not None
    made.save(str(folder / "plain.onnx"), external_data=False)
    for tier in tiers:
        mp.export_onnx(mp.convert(model, x, tier), folder / f"{tier}.onnx", "classification", verify=False)
    return {name: folder / f"{name}.onnx" for name in ("plain", *tiers)}


class Server:
    """The service in a process of its own, on a free port of the loopback address."""

    def __init__(self, path: Path, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, str(SERVER), str(path)]
        self.command += ["--port", str(self.port), "--threads", str(threads)]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> int:
        try:
            self.process = subprocess.Popen(self.command)
            end = time.monotonic() + 60
            while time.monotonic() < end and self.process.poll() is None:
                if self._is_ready():
                    return self.port
                time.sleep(0.1)
            raise RuntimeError("the service did not start")
        except BaseException:  # Ctrl-C too: nothing else would stop the process
            self.__exit__()
            raise

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            return ask(connection, "GET", "/health") == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> int:
    connection.request(method, path, body, {"Content-Type": "application/x-npy"})
    response = connection.getresponse()
    response.read()
    return response.status


def load(port: int, images: int, clients: int, seconds: float) -> tuple[float, list[float]]:
    """Each client sends the next request when it has the answer. Wall time, and seconds of every request."""
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(0).normal(size=(images, *SHAPE)).astype(np.float32))
    body = buffer.getvalue()
    found: list[float] = []
    problems: list[str] = []
    end = time.perf_counter() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            ask(connection, "POST", "/predict", body)  # the first one opens the connection
            while time.perf_counter() < end:
                begin = time.perf_counter()
                status = ask(connection, "POST", "/predict", body)
                found.append(time.perf_counter() - begin)
                if status != 200:
                    problems.append(f"status {status}")
                    return
        except Exception as error:  # a thread's own would be lost, and the rate too low
            problems.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems or not found:
        raise RuntimeError(f"not all was answered: {'; '.join(problems) or 'no request at all'}")
    return time.perf_counter() - start, found


def summarize(images: int, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        seconds = sorted(values["seconds"])
        rows.append(
            {
                "images": images,
                "network": name,
                "requests": len(seconds),
                "requests_per_second": len(seconds) / values["spent"],
                "median": seconds[len(seconds) // 2],
                "p99": seconds[math.ceil(0.99 * len(seconds)) - 1],
            }
        )
    for row in rows:
        row["rate_ratio"] = row["requests_per_second"] / rows[0]["requests_per_second"]
        row["p99_ratio"] = row["p99"] / rows[0]["p99"]
    return rows


if __name__ == "__main__":
    main()
