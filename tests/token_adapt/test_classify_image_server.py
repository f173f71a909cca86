"""`classify_image` in a real Triton, over an emulated model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from shapeshift.build_engines.image import front as images
from shapeshift.build_engines.image import plan
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.token_adapt.model import emulated, vision_model
from shapeshift.token_adapt.tasks import registry
from shapeshift.token_adapt.tasks.registry import TaskEntry
from shapeshift.triton import metrics, model_config
from tests import waiting
from tests.token_adapt.token_models import OUTPUTS, PROFILES, PROJECT, TASKS, encoded, square
from tests.token_adapt.token_tasks import STATED, noise, paths, register, write_task

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.01)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

BUILD = PROJECT / "build"
MODEL, COMPUTED = "classify_image", "computed"


@pytest.fixture(scope="module")
def emulated_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated repository of `classify_image` over an emulated model."""
    root = tmp_path_factory.mktemp("emulated")
    folder = root / "model_repository" / MODEL
    folder.mkdir(parents=True)
    emulated.write(folder / "model.json", 32, list(PROFILES.values()), list(TASKS.values()))
    stated = {"provider": "emulated", "profile_file": "model.json", "task": "animals"}
    (front,) = front_models(configured(root, MODEL, stated), {MODEL})
    assert isinstance(front, images.EmulatedFrontConfig)
    images.publish_emulated(front, paths(root))
    return paths(root).generated


@pytest.fixture(scope="module")
def computed_root(tmp_path_factory: pytest.TempPathFactory, copy_project: Callable[..., Path]) -> Path:
    """The project of `computed`, a small model with engines and a task."""
    root = copy_project(tmp_path_factory.mktemp("computed"), COMPUTED)
    write_task(root, "first", 3)
    register(root, "first")
    (front,) = front_models(configured(root, COMPUTED, STATED), {COMPUTED})
    assert isinstance(front, plan.ImageFrontConfig)
    assert images.publish(front, paths(root), lambda step: None)[1] == "up to date"
    return root


def configured(root: Path, name: str, parameters: dict[str, str]) -> BuildPaths:
    """A front model `name` like the project's own, with these parameters."""
    config = model_config.read(PROJECT / "model_repository" / MODEL / "config.pbtxt")
    config.name = name
    config.parameters.clear()
    for key, value in parameters.items():
        model_config.set_parameter(config, key, value)
    folder = root / "model_repository" / name
    folder.mkdir(parents=True, exist_ok=True)
    model_config.write(config, folder / "config.pbtxt")
    return paths(root)


@pytest.fixture(scope="module")
def server(
    emulated_repository: Path,
    computed_root: Path,
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    repositories = (emulated_repository, paths(computed_root).generated)
    with make_server(repositories, (MODEL, COMPUTED), tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready()


@pytest.fixture
def total(server: TritonServer) -> Callable[..., float]:
    """A function that reads the current value of a metric."""

    def read(name: str, model: str = MODEL, **labels: str) -> float:
        wanted = {*labels.items(), ("model", model)}
        samples = metrics.scrape(server.metrics_url).items()
        return sum(value for (series, own), value in samples if series == f"shapeshift_{name}" and wanted <= own)

    return read


@pytest.fixture
def client(server: TritonServer) -> Iterator[grpc_client.InferenceServerClient]:
    with grpc_client.InferenceServerClient(server.grpc_url) as made:
        yield made


def image(kind: Any, *files: bytes) -> Any:
    made = kind.InferInput("IMAGE", [len(files), 1], "BYTES")
    made.set_data_from_numpy(np.array([[data] for data in files], dtype=object))
    return made


def pixels(kind: Any, values: np.ndarray) -> Any:
    made = kind.InferInput("PIXELS", list(values.shape), "UINT8")
    made.set_data_from_numpy(values)
    return made


GOOD = encoded(square(1, 40), "JPEG")


def test_both_protocols_give_all_outputs(server: TritonServer, client: Any) -> None:
    with http_client.InferenceServerClient(server.http_url) as over_http:
        for kind, connection in ((grpc_client, client), (http_client, over_http)):
            for given in (
                image(kind, GOOD, encoded(square(2, 9)[:, :, 0])),
                pixels(kind, np.stack([square(1, 20)] * 2)),
            ):
                answer = connection.infer(MODEL, [given], parameters={"task": "digits", "utility": 0.5})
                found = {name: answer.as_numpy(name) for name in OUTPUTS}
                assert found["LABEL"].tolist() == [[b"0"], [b"0"]]
                assert found["PROBABILITIES"].shape == (2, 10) and found["PROBABILITIES"].dtype == np.float32
                assert found["GAMMA"].tolist() == [[0]] * 2 or found["GAMMA"].tolist() == [[2]] * 2
                assert found["BATCH_SIZE"].dtype == np.int32
                assert found["OUTCOME"].tolist() == [[b"in_time"]] * 2


@pytest.mark.parametrize(
    ("given", "parameters", "status", "message"),
    [
        (lambda: image(grpc_client, b"no image"), {}, "INVALID_ARGUMENT", "row 0: IMAGE"),
        (lambda: image(grpc_client, GOOD, GOOD[:300]), {}, "INVALID_ARGUMENT", "row 1: IMAGE"),
        (lambda: pixels(grpc_client, square(1)[None, :, :, :2]), {}, "INVALID_ARGUMENT", "PIXELS"),
        (lambda: image(grpc_client, encoded(np.zeros((5001, 5000, 3), np.uint8))), {}, "INVALID_ARGUMENT", "at most"),
        (lambda: image(grpc_client, GOOD), {"task": "weeds"}, "NOT_FOUND", "registered tasks: animals, digits"),
        (lambda: image(grpc_client, GOOD), {"task": "../tasks"}, "NOT_FOUND", "registered tasks: animals, digits"),
        (lambda: image(grpc_client, GOOD), {"latency_ms": 0}, "INVALID_ARGUMENT", "latency_ms: got 0; above 0"),
        (lambda: image(grpc_client, GOOD), {"latency_ms": -3.5}, "INVALID_ARGUMENT", "latency_ms: got -3.5"),
        (lambda: image(grpc_client, GOOD), {"utility": float("nan")}, "INVALID_ARGUMENT", "utility"),
        (lambda: image(grpc_client, GOOD), {"utility": -1.0}, "INVALID_ARGUMENT", "utility"),
        (lambda: image(grpc_client, GOOD), {"gamma": 2}, "INVALID_ARGUMENT", "unknown parameter"),
    ],
)
def test_invalid_requests_get_coded_errors_and_other_requests_succeed(
    client: Any, given: Callable[[], Any], parameters: dict[str, Any], status: str, message: str
) -> None:
    beside: list[Any] = []
    client.async_infer(MODEL, [image(grpc_client, GOOD)], lambda result, error: beside.append(error or result))
    with pytest.raises(InferenceServerException, match=message) as refused:
        client.infer(MODEL, [given()], parameters=parameters)
    assert refused.value.status() == f"StatusCode.{status}"
    wait_for(lambda: beside)
    assert beside[0].as_numpy("OUTCOME").tolist() == [[b"in_time"]]


def test_every_request_of_an_overload_is_answered(client: Any) -> None:
    """Images that decoding would make late are refused on arrival; of the others, some are evicted."""
    answers: list[Any] = []
    count = 200
    given = [image(grpc_client, *[GOOD] * 16)]
    for _ in range(count):
        client.async_infer(
            MODEL, given, lambda result, error: answers.append(error or result), parameters={"latency_ms": 40}
        )
    wait_for(lambda: len(answers) == count)
    refused = [answer for answer in answers if isinstance(answer, InferenceServerException)]
    assert all(answer.status() == "StatusCode.UNAVAILABLE" and "latency_ms" in str(answer) for answer in refused)
    served = [answer for answer in answers if not isinstance(answer, InferenceServerException)]
    outcomes = {outcome for answer in served for outcome in answer.as_numpy("OUTCOME")[:, 0]}
    assert outcomes <= {b"in_time", b"late", b"evicted"} and served and (refused or b"evicted" in outcomes)
    for answer in served:
        for label, outcome, gamma in zip(
            *(answer.as_numpy(n)[:, 0] for n in ("LABEL", "OUTCOME", "GAMMA")), strict=True
        ):
            assert (label == b"") == (outcome == b"evicted")
            assert gamma in PROFILES


def test_metrics_are_exported(total: Callable[..., float], client: Any) -> None:
    before = total("images_total", outcome="in_time")
    client.infer(MODEL, [image(grpc_client, GOOD, GOOD, GOOD)])
    wait_for(lambda: total("images_total", outcome="in_time") >= before + 3)
    assert total("batch_images_count") > 0 and total("gamma_images_total", gamma="2") > 0
    assert total("tasks") == len(TASKS)


def test_the_example_classifies_files(server: TritonServer, tmp_path: Path) -> None:
    files = [tmp_path / "one.jpg", tmp_path / "two.png"]
    files[0].write_bytes(GOOD)
    files[1].write_bytes(encoded(square(3, 16)))
    command = [
        sys.executable,
        str(PROJECT / "client" / "classify_image_grpc.py"),
        "--url",
        server.grpc_url,
        "--task",
        "digits",
    ]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{file}: 0 (in_time)" for file in files]


# A model with engines.


def test_answers_are_those_of_the_engines(client: Any, computed_root: Path) -> None:
    shown = noise(5)
    answer = client.infer(COMPUTED, [pixels(grpc_client, shown)], parameters={"latency_ms": 60000})
    gammas = set(answer.as_numpy("GAMMA")[:, 0].tolist())
    assert answer.as_numpy("OUTCOME")[:, 0].tolist() == [b"in_time"] * 5 and gammas <= {-5, 0, 2}
    model = vision_model.open_model(computed_root / "build" / "engines" / COMPUTED, computed_root / "tasks", 1)
    assert model.reload_tasks() == []
    task = model.tasks["first"]
    found = answer.as_numpy("PROBABILITIES")
    for row, gamma in enumerate(answer.as_numpy("GAMMA")[:, 0].tolist()):
        wanted = model.run(gamma, shown[row : row + 1], [task])[0]
        assert found[row] == pytest.approx(wanted, abs=1e-5)
        assert answer.as_numpy("LABEL")[row, 0].decode() == task.labels[int(wanted.argmax())]


def test_tasks_can_be_added_at_run_time_and_invalid_ones_change_nothing(
    client: Any, computed_root: Path, total: Callable[..., float]
) -> None:
    def ask(task: str) -> Any:
        return client.infer(COMPUTED, [pixels(grpc_client, noise(1))], parameters={"task": task, "latency_ms": 60000})

    with pytest.raises(InferenceServerException, match="no task 'second'; registered tasks: embedding, first"):
        ask("second")
    folder = write_task(computed_root, "second", 4, seed=1)
    register(computed_root, "second")
    wait_for(lambda: total("tasks", COMPUTED) == 3)
    assert ask("second").as_numpy("PROBABILITIES").shape == (1, 4)
    (folder / "prompts.safetensors").write_bytes(b"no prompts")
    registry.add(computed_root / "tasks", TaskEntry("third", folder, "0" * 64))
    wait_for(lambda: total("tasks_refused_total", COMPUTED) >= 1)
    assert total("tasks", COMPUTED) == 3
    assert ask("first").as_numpy("PROBABILITIES").shape == (1, 3)
    assert ask("second").as_numpy("PROBABILITIES").shape == (1, 4)
