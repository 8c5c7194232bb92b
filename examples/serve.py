"""A service that answers with a label, its probabilities, and how far to trust them.

FastAPI and ONNX Runtime; PyTorch is not needed to run it, only to make the file:

    bnn = mp.convert(model, x)
    mp.export_onnx(bnn, "model.onnx", "classification", preprocessing="divide by 255, subtract 0.5")

    pip install 'momentprop[serve]'
    python examples/serve.py model.onnx --classes cat,dog,ship --abstain-above 0.7

    curl --data-binary @images.npy -H 'Content-Type: application/x-npy' localhost:8000/predict

Images come as one array [batch, ...] in the .npy format (numpy.save; nothing is unpickled), or as JSON,
{"images": [[...], ...]}. While a batch runs, requests gather; they then run as one batch. A file of a plain
network (one output, logits) is served too, without epistemic uncertainty: that is what to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel

NPY, JSON = "application/x-npy", "application/json"


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 16 * 2**20
    images: int = 256  # in one request
    queue: int = 64  # requests that wait
    connections: int = 128  # open at once, those that are still being read among them
    batch: int = 64  # images that run together; a request with more runs alone
    retry_after: int = 1  # seconds, told to those who find the queue full


class Uncertainty(BaseModel):
    """In nats. Total is the entropy of the probabilities; epistemic is what more training data could remove,
    aleatoric the rest. A plain network cannot tell them apart."""

    total: float
    epistemic: float | None
    aleatoric: float | None


class Prediction(BaseModel):
    label: str
    index: int
    probabilities: list[float]
    uncertainty: Uncertainty
    abstain: bool


class Answer(BaseModel):
    predictions: list[Prediction]


class Classifier:
    """An ONNX file with the outputs that `mp.export_onnx(..., "classification")` gives it, or logits."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        classes: list[str] | None = None,
        abstain_above: float | None = None,
        threads: int = 0,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            os.fspath(path), options, providers=["CPUExecutionProvider"]
        )
        [port] = self.session.get_inputs()
        self.input, self.shape = port.name, tuple(port.shape[1:])
        if port.type != "tensor(float)":
            raise SystemExit(f"{path} takes {port.type}; this service sends float32 images")
        self.outputs = [output.name for output in self.session.get_outputs()]
        if "probs" not in self.outputs and len(self.outputs) != 1:
            raise SystemExit(
                f"{path} returns {', '.join(self.outputs)}: export it with outputs='classification'"
            )
        about = self.session.get_modelmeta().custom_metadata_map.get("momentprop", "{}")
        self.preprocessing = str(json.loads(about).get("preprocessing", ""))
        n_classes = self.session.get_outputs()[0].shape[-1]
        self.classes = classes or [str(k) for k in range(n_classes)]
        if len(self.classes) != n_classes:
            raise SystemExit(f"{path} has {n_classes} classes, and {len(self.classes)} names were given")
        self.abstain_above = math.log(n_classes) / 2 if abstain_above is None else abstain_above

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        found = dict(zip(self.outputs, self.session.run(None, {self.input: images}), strict=True))
        if "probs" in found:
            return found
        [logits] = found.values()
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        probs = exponentials / exponentials.sum(-1, keepdims=True)
        return {"probs": probs, "total": -(probs * np.log(np.maximum(probs, 1e-30))).sum(-1)}

    def predictions(self, found: dict[str, np.ndarray]) -> list[Prediction]:
        parts = ("total", "epistemic", "aleatoric")
        answers = []
        for i, row in enumerate(found["probs"]):
            index = int(row.argmax())
            uncertainty = Uncertainty(**{p: float(found[p][i]) if p in found else None for p in parts})
            answers.append(
                Prediction(
                    label=self.classes[index],
                    index=index,
                    probabilities=row.tolist(),
                    uncertainty=uncertainty,
                    abstain=not uncertainty.total <= self.abstain_above,
                )
            )
        return answers

    def read(self, body: bytes, kind: str, limits: Limits) -> np.ndarray:
        """The images in a body; ValueError says what is wrong with it."""
        if kind not in (NPY, JSON):
            raise ValueError(f"Content-Type must be {NPY} or {JSON}, not {kind or 'missing'}")
        images = read_npy(body) if kind == NPY else read_json(body)
        wanted = ", ".join(map(str, self.shape))
        if images.shape[1:] != self.shape or images.ndim != 1 + len(self.shape):
            raise ValueError(f"images must be [batch, {wanted}], not {list(images.shape)}")
        if not 1 <= len(images) <= limits.images:
            raise ValueError(f"send 1 to {limits.images} images at once, not {len(images)}")
        with np.errstate(over="ignore"):  # too large for float32: infinite, and refused below
            images = np.ascontiguousarray(images, dtype=np.float32)
        if not np.isfinite(images).all():
            raise ValueError("images must be finite float32 numbers")
        return images


def read_npy(body: bytes) -> np.ndarray:
    """The header is believed only where it fits the bytes behind it; objects (pickles) are refused."""
    stream = BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = reader[version](stream)
    except Exception as error:  # numpy lets those of its parsers through, of a dozen kinds
        raise ValueError(f"the body is no .npy file: {error}") from None
    if dtype.kind != "f":
        raise ValueError(f"images must be floating-point numbers, not {dtype}")
    data = body[stream.tell() :]
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"the .npy file says {list(shape)} of {dtype}, but has {len(data)} bytes of them")
    try:
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except (ValueError, OverflowError):  # no elements, but the other sizes are beyond all bounds
        raise ValueError(f"there are no arrays of {list(shape)}") from None


def read_json(body: bytes) -> np.ndarray:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is no JSON") from None
    if not isinstance(given, dict) or set(given) != {"images"}:
        raise ValueError('the body must be {"images": [[...], ...]}')
    try:
        return np.asarray(given["images"], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("images must be nested lists of numbers, all of one shape") from None


class Metrics:
    """What Prometheus collects."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("requests", "Requests for a prediction, by status", ["status"], **options)
        self.images = Counter("images", "Images answered", **options)
        self.abstained = Counter("abstained", "Images answered with abstain", **options)
        self.waiting = Gauge("requests_waiting", "Requests in the queue", **options)
        self.batch = Histogram("batch_images", "Images run together", buckets=_powers(1, 9), **options)
        seconds = [n / 1024 for n in _powers(0, 14)]
        self.seconds = Histogram("request_seconds", "From arrival to answer", buckets=seconds, **options)


def _powers(first: int, last: int) -> list[float]:
    return [float(2**k) for k in range(first - 1, last)]


@dataclass(eq=False)
class Job:
    images: np.ndarray
    done: asyncio.Future[dict[str, np.ndarray]]


class Batcher:
    """Runs what waits as one batch, one batch at a time; ONNX Runtime uses the cores."""

    def __init__(self, classifier: Classifier, limits: Limits, metrics: Metrics) -> None:
        self.classifier, self.limits, self.metrics = classifier, limits, metrics
        self.queue: asyncio.Queue[Job] = asyncio.Queue(limits.queue)
        self.worker: asyncio.Task[None] | None = None

    @property
    def works(self) -> bool:
        return self.worker is not None and not self.worker.done()

    async def submit(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Raises QueueFull at once rather than let everyone wait."""
        job = Job(images, asyncio.get_running_loop().create_future())
        self.queue.put_nowait(job)
        return await job.done

    async def work(self) -> None:
        held: Job | None = None
        while True:
            jobs = [held or await self.queue.get()]
            held = None
            while not self.queue.empty():
                held = self.queue.get_nowait()
                if sum(len(job.images) for job in (*jobs, held)) > self.limits.batch:
                    break
                jobs.append(held)
                held = None
            await self._answer([job for job in jobs if not job.done.cancelled()])

    async def _answer(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        try:
            images = np.concatenate([job.images for job in jobs])
            self.metrics.batch.observe(len(images))
            found = await asyncio.to_thread(self.classifier.run, images)
            begin = 0
            for job in jobs:
                part = slice(begin, begin := begin + len(job.images))
                values = {name: value[part] for name, value in found.items()}
                if not job.done.done():
                    job.done.set_result(values)
        except Exception as error:  # the service goes on; these requests get status 500
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)


def create_app(classifier: Classifier, limits: Limits | None = None) -> FastAPI:
    limits, metrics = limits or Limits(), Metrics()
    batcher = Batcher(classifier, limits, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.worker = asyncio.create_task(batcher.work())
        yield
        batcher.worker.cancel()  # the server has let open requests finish before it comes here

    app = FastAPI(title="Predictions with uncertainty", lifespan=lifespan)
    app.state.batcher = batcher

    @app.post("/predict", response_model=Answer)
    async def predict(request: Request) -> Answer:
        start, status = time.perf_counter(), 500
        try:
            images = await _images(request)
            if not batcher.works:  # nobody would ever answer
                raise HTTPException(503, "the service is broken: it must be started again")
            try:
                found = await batcher.submit(images)
            except asyncio.QueueFull:
                raise HTTPException(
                    503, "too many requests wait", headers={"Retry-After": str(limits.retry_after)}
                ) from None
            answers = classifier.predictions(found)
            status = 200
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            metrics.requests.labels(str(status)).inc()
            metrics.seconds.observe(time.perf_counter() - start)
        metrics.images.inc(len(answers))
        metrics.abstained.inc(sum(answer.abstain for answer in answers))
        return Answer(predictions=answers)

    async def _images(request: Request) -> np.ndarray:
        declared = int(request.headers.get("content-length", 0))  # the server has checked that it is a number
        body = bytearray()
        if declared <= limits.body_bytes:
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    break
        if max(declared, len(body)) > limits.body_bytes:
            raise HTTPException(413, f"a body may have {limits.body_bytes} bytes")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            # in a thread: a large body takes long, and others are not to wait for it
            return await asyncio.to_thread(classifier.read, bytes(body), kind, limits)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    @app.get("/health")
    async def health(response: Response) -> dict[str, Any]:
        response.status_code = 200 if batcher.works else 503
        return {
            "status": "ok" if batcher.works else "broken",
            "images": ["batch", *classifier.shape],
            "classes": classifier.classes,
            "preprocessing": classifier.preprocessing,
            "waiting": batcher.queue.qsize(),
        }

    @app.get("/metrics")
    async def show_metrics() -> Response:
        metrics.waiting.set(batcher.queue.qsize())
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("--classes", help="their names, with commas between")
    parser.add_argument("--abstain-above", type=float, help="entropy in nats (default: half of the largest)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime (default: one per core)")
    args = parser.parse_args()
    names = args.classes.split(",") if args.classes else None
    classifier = Classifier(args.model, names, args.abstain_above, args.threads)
    limits = Limits()
    uvicorn.run(
        create_app(classifier, limits),
        host=args.host,
        port=args.port,
        log_level="warning",
        limit_concurrency=limits.connections,  # whoever comes then gets 503
        timeout_graceful_shutdown=10,  # seconds for open requests after SIGTERM
    )


if __name__ == "__main__":
    main()
