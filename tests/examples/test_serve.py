"""examples/serve.py: answers, limits, mistakes of callers, metrics."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import momentprop as mp
from scripts import script
from small import mlp

PACKAGES = ("fastapi", "httpx2", "prometheus_client", "onnxruntime", "onnxscript")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)), reason="comes with the extras serve and onnx"
)

NPY = {"Content-Type": "application/x-npy"}


@pytest.fixture(scope="module")
def serve() -> Iterator[ModuleType]:
    with script("examples/serve.py") as module:
        yield module


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return mlp().eval()


@pytest.fixture(scope="module")
def file(network: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "model.onnx"
    bnn = mp.convert(network, torch.zeros(2, 4), "accurate")
    mp.export_onnx(bnn, path, "classification", verify=False, preprocessing="none")
    return path


def client_of(app: Any, **options: Any) -> Any:
    from fastapi.testclient import TestClient

    return TestClient(app, **options)


@pytest.fixture
def client(serve: ModuleType, file: Path) -> Iterator[Any]:
    limits = serve.Limits(body_bytes=4000, images=8, queue=2, batch=4)
    classifier = serve.Classifier(file, ["cat", "dog", "ship"], abstain_above=1.0, threads=1)
    with client_of(serve.create_app(classifier, limits)) as found:
        yield found


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_answers_are_those_of_the_network(client: Any, network: torch.nn.Module) -> None:
    x = 3 * torch.randn(5, 4)
    answer = client.post("/predict", content=npy(x.numpy()), headers=NPY)
    assert answer.status_code == 200, answer.text
    with torch.no_grad():
        expected = mp.classify(mp.convert(network, x, "accurate")(x))
    for i, row in enumerate(answer.json()["predictions"]):
        assert row["probabilities"] == pytest.approx(expected.probs[i].tolist(), abs=1e-5)
        assert row["label"] == ["cat", "dog", "ship"][row["index"]]
        assert row["index"] == int(expected.probs[i].argmax())
        parts = row["uncertainty"]
        assert parts["total"] == pytest.approx(float(expected.total[i]), abs=1e-5)
        assert parts["epistemic"] == pytest.approx(float(expected.epistemic[i]), abs=1e-5)
        assert parts["aleatoric"] == pytest.approx(parts["total"] - parts["epistemic"], abs=1e-5)
        assert row["abstain"] is (parts["total"] > 1.0)


def test_json_and_other_layouts_give_the_same(client: Any) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    wanted = client.post("/predict", content=npy(x), headers=NPY).json()
    for same in (np.asfortranarray(x), x.astype(">f4"), x.astype(np.float64)):
        assert client.post("/predict", content=npy(same), headers=NPY).json() == wanted
    assert client.post("/predict", json={"images": x.astype(float).tolist()}).json() == wanted


def test_a_plain_network_has_no_epistemic_part(
    serve: ModuleType, network: torch.nn.Module, tmp_path: Path
) -> None:
    made = torch.onnx.export(network, (torch.zeros(2, 4),), dynamo=True, verbose=False)
    assert made is not None
    made.save(str(tmp_path / "plain.onnx"))
    [row] = serve.Classifier(tmp_path / "plain.onnx").predictions(
        serve.Classifier(tmp_path / "plain.onnx").run(np.zeros((2, 4), np.float32))
    )[:1]
    with torch.no_grad():
        probs = network(torch.zeros(1, 4)).softmax(-1)[0]
    assert row.probabilities == pytest.approx(probs.tolist(), abs=1e-6)
    assert row.uncertainty.total == pytest.approx(float(-(probs * probs.log()).sum()), abs=1e-6)
    assert row.uncertainty.epistemic is None


def _header(shape: str, dtype: str = "<f4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (npy(np.zeros((2, 5), np.float32)), "[batch, 4], not [2, 5]"),
        (npy(np.zeros(4, np.float32)), "[batch, 4], not [4]"),
        (npy(np.zeros((0, 4), np.float32)), "1 to 8 images"),
        (npy(np.zeros((9, 4), np.float32)), "1 to 8 images"),
        (npy(np.zeros((2, 4), np.uint8)), "floating-point"),
        (npy(np.full((2, 4), np.nan, np.float32)), "finite"),
        (npy(np.full((2, 4), 1e300)), "finite"),
        (npy(np.zeros((2, 4), np.float32))[:-1], "bytes"),
        (_header("(10**9, 4)"), "no .npy file"),
        (_header("(1000000000, 4)"), "bytes"),
        (_header("(2, 4)", "|O") + b"cos\nsystem\n", "floating-point"),
        (_header("(2, 4"), "no .npy file"),
        (_header("(" + "-" * 3000 + "1, 4)"), "no .npy file"),
        (_header("(2, 4)").replace(b"'<f4'", b"()   "), "no .npy file"),
        (_header(f"(0, {10**30})"), "no arrays of"),
        (b"", "no .npy file"),
        (b"not numpy at all", "no .npy file"),
    ],
)
def test_mistakes_are_named(client: Any, body: bytes, message: str) -> None:
    answer = client.post("/predict", content=body, headers=NPY)
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"[" * 3000, "no JSON"),
        (b"[1]", "images"),
        (b'{"images": [[1, 2], [3]]}', "of one shape"),
        (b'{"images": [["a", 2, 3, 4]]}', "numbers"),
        (b'{"images": [[NaN, 2, 3, 4]]}', "finite"),
        (b'{"images": 3}', "[batch, 4]"),
    ],
)
def test_mistakes_in_json_are_named(client: Any, body: bytes, message: str) -> None:
    answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["detail"]


def test_other_types_and_long_bodies_are_refused(client: Any) -> None:
    answer = client.post("/predict", content=b"x", headers={"Content-Type": "image/png"})
    assert answer.status_code == 422
    assert "application/x-npy" in answer.json()["detail"]
    assert client.post("/predict", content=b"x" * 4001, headers=NPY).status_code == 413

    def parts() -> Iterator[bytes]:  # sent in pieces, without a length
        for _ in range(5):
            yield b"x" * 1000

    assert client.post("/predict", content=parts(), headers=NPY).status_code == 413


def test_a_full_queue_is_said_and_waiting_requests_run_together(client: Any) -> None:
    """The first request is held up inside the network; two may wait; the fourth is sent away."""
    batcher = client.app.state.batcher
    real, entered, go_on = batcher.classifier.run, threading.Event(), threading.Event()
    sizes: list[int] = []

    def slow(images: np.ndarray) -> Any:
        sizes.append(len(images))
        entered.set()
        assert go_on.wait(30)
        return real(images)

    batcher.classifier.run = slow
    body, statuses = npy(np.zeros((2, 4), np.float32)), []

    def post() -> None:
        statuses.append(client.post("/predict", content=body, headers=NPY).status_code)

    threads = [threading.Thread(target=post) for _ in range(3)]
    threads[0].start()
    assert entered.wait(30)
    for thread in threads[1:]:
        thread.start()
    while client.get("/health").json()["waiting"] < 2:
        pass
    answer = client.post("/predict", content=body, headers=NPY)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert statuses == [200, 200, 200]
    assert sizes == [2, 4]


def test_an_error_inside_is_500_and_the_service_goes_on(serve: ModuleType, file: Path) -> None:
    classifier = serve.Classifier(file)
    real, body = classifier.run, npy(np.zeros((1, 4), np.float32))

    def broken(images: np.ndarray) -> Any:
        raise RuntimeError("broken")

    with client_of(serve.create_app(classifier), raise_server_exceptions=False) as client:
        classifier.run = broken
        assert client.post("/predict", content=body, headers=NPY).status_code == 500
        classifier.run = real
        assert client.post("/predict", content=body, headers=NPY).status_code == 200


def test_answers_that_cannot_be_divided_do_not_end_the_service(serve: ModuleType, file: Path) -> None:
    classifier = serve.Classifier(file)
    real, body = classifier.run, npy(np.zeros((1, 4), np.float32))
    with client_of(serve.create_app(classifier), raise_server_exceptions=False) as client:
        classifier.run = lambda images: {"probs": np.float32(1)}
        assert client.post("/predict", content=body, headers=NPY).status_code == 500
        classifier.run = real
        assert client.get("/health").status_code == 200
        assert client.post("/predict", content=body, headers=NPY).status_code == 200


def test_health_says_that_nothing_is_answered_any_more(client: Any) -> None:
    assert client.get("/health").status_code == 200
    batcher = client.app.state.batcher
    client.portal.call(batcher.worker.cancel)
    found = client.get("/health")
    assert (found.status_code, found.json()["status"]) == (503, "broken")
    answer = client.post("/predict", content=npy(np.zeros((1, 4), np.float32)), headers=NPY)
    assert (answer.status_code, "started again" in answer.text) == (503, True)


def test_others_are_answered_while_a_body_is_parsed(client: Any) -> None:
    classifier = client.app.state.batcher.classifier
    real, entered, go_on = classifier.read, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return real(*arguments)

    classifier.read = slow
    body, statuses = npy(np.zeros((2, 4), np.float32)), []

    def post() -> None:
        statuses.append(client.post("/predict", content=body, headers=NPY).status_code)

    thread = threading.Thread(target=post)
    thread.start()
    assert entered.wait(10)
    assert client.get("/health").status_code == 200
    assert not statuses
    go_on.set()
    thread.join(30)
    assert statuses == [200]


def test_connections_are_bounded(serve: ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="comes with the extra serve")
    given: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: given.update(options))
    monkeypatch.setattr(sys, "argv", ["serve.py", str(file)])
    serve.main()
    assert given["limit_concurrency"] == serve.Limits().connections


def test_health_and_metrics(client: Any) -> None:
    found = client.get("/health")
    assert found.status_code == 200
    assert found.json() == {
        "status": "ok",
        "images": ["batch", 4],
        "classes": ["cat", "dog", "ship"],
        "preprocessing": "none",
        "waiting": 0,
    }
    client.post("/predict", content=npy(np.zeros((3, 4), np.float32)), headers=NPY)
    client.post("/predict", content=b"", headers=NPY)
    text = client.get("/metrics").text
    for line in (
        'requests_total{status="200"} 1.0',
        'requests_total{status="422"} 1.0',
        "images_total 3.0",
        "batch_images_sum 3.0",
        "request_seconds_count 2.0",
        "requests_waiting 0.0",
    ):
        assert line in text.splitlines(), line


def test_files_that_do_not_fit_are_refused_at_the_start(
    serve: ModuleType, network: torch.nn.Module, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="3 classes, and 2 names"):
        serve.Classifier(file, ["cat", "dog"])
    mp.export_onnx(mp.convert(network, torch.zeros(2, 4), "fast"), tmp_path / "m.onnx", verify=False)
    with pytest.raises(SystemExit, match="classification"):
        serve.Classifier(tmp_path / "m.onnx")


def test_the_documentation_of_the_service_is_json(client: Any) -> None:
    assert "/predict" in json.loads(client.get("/openapi.json").text)["paths"]
