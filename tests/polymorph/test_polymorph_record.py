"""`shapeshift record`: the requests of a front in this process, and those of all fronts of a server."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from PIL import Image

from shapeshift.cli.main import main
from shapeshift.engines.execution.executor import EngineExecutor, ExecutorSettings
from shapeshift.engines.execution.request import TextRequest
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import events
from shapeshift.simulate import scenario
from shapeshift.simulate.systems import TextSystem
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.workloads import trace
from tests.fakes import ids_request
from tests.simulate.test_served_and_simulated import simulated
from tests.waiting import wait_for

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build folder of a server whose fronts have rings."""
    folder = tmp_path / "build" / "run" / "events"
    monkeypatch.setenv(events.VARIABLE, str(folder))
    return tmp_path / "build"


@contextmanager
def sending(send: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Call `send` again and again."""
    stop = threading.Event()

    def again() -> None:
        while not stop.wait(pause_s):
            send()

    thread = threading.Thread(target=again)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_what_arrives_is_written_without_texts(
    recording: Path, tmp_path: Path, make_front: Callable[..., TextFront], capsys: pytest.CaptureFixture[str]
) -> None:
    front = make_front()
    before = ids_request([101] * 9)
    front.execute([before])
    before.vectors()
    limits = {"latency_ms": 900.0, "slo_class": "batch"}
    with sending(lambda: front.execute([ids_request([101] * 5, [101] * 30, parameters=limits)]), 0.02):
        status = main(["record", "front", str(tmp_path / "trace.csv"), "--seconds", "0.8", "--build", str(recording)])
    recorded = trace.read(tmp_path / "trace.csv")
    assert status == 0 and "requests of front, the last after" in capsys.readouterr().out
    assert len(recorded) >= 10 and recorded.at_s[-1] < 0.8
    assert sorted({*recorded.length.tolist()}) == [5, 30], "not the one before"
    assert {*recorded.latency_ms.tolist()} == {900.0} and {*recorded.slo_class.tolist()} == {"batch"}
    # Nobody asks any more.
    (file,) = (recording / "run" / "events").glob("front.*")
    reader = events.RingReader(file)
    # Some were on their way when the record ended.
    wait_for(lambda: front.load() == 0)
    time.sleep(0.2)
    reader.read()
    reader.want_requests(0.0)
    front.execute([after := ids_request([101] * 4)])
    after.vectors()
    time.sleep(0.2)
    assert [event for event in reader.read() if event.kind == "requests"] == []


def test_a_request_of_many_texts_loses_no_length(
    recording: Path, tmp_path: Path, make_front: Callable[..., TextFront]
) -> None:
    front = make_front()
    lengths = [*range(2, 40)]
    with sending(lambda: front.execute([ids_request(*([101] * length for length in lengths))]), 0.1):
        assert main(["record", "front", str(tmp_path / "t.csv"), "--seconds", "0.7", "--build", str(recording)]) == 0
    recorded = trace.read(tmp_path / "t.csv").length.tolist()
    assert recorded[: len(lengths)] == lengths and len(recorded) % len(lengths) == 0


def test_a_plan_may_begin_with_a_record(
    recording: Path, tmp_path: Path, make_front: Callable[..., TextFront], capsys: pytest.CaptureFixture[str]
) -> None:
    front = make_front()
    (tmp_path / "profile.json").write_text(json.dumps({"lengths": [8, 64], "latency_ms": [2.0, 16.0]}))
    (tmp_path / "plan.toml").write_text(
        "[slo]\nlatency_ms = 50\n[workers.a]\nprofile = 'profile.json'\nprice = 2\nbins = [64]\n"
    )
    words = ["--from-server", "front", "--seconds", "0.6", "--build", str(recording), "--json"]
    with sending(lambda: front.execute([ids_request([101] * 50) for _ in range(12)]), 0.1):
        assert main(["plan", str(tmp_path / "plan.toml"), *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    # Of twelve at once 98% must be answered, after at most three calls.
    assert answer["best"]["workers"] >= 2 and answer["best"]["cost"] == 2 * answer["best"]["workers"]
    assert {*trace.read(recording / "run" / "front.trace.csv").length.tolist()} == {50}


class HeldCalls:
    """Engines of one kind whose calls end when the test says so. A text is a row of ids, each its index + 1."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._ends: list[threading.Event] = []

    def open(self, *_: object) -> HeldCalls:
        return self

    engine = open
    rows = tokens = None

    def used_mb(self) -> float:
        return 0.0

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if inputs["INPUT_IDS"].any():
            number = len(self._ends)
            self._ends.append(threading.Event())
            self.texts.append([int(index) - 1 for index in dict.fromkeys(inputs["INPUT_IDS"][0].tolist())])
            assert self._ends[number].wait(60)
        return {"EMBEDDING": np.zeros((len(inputs["ROWS"]), 1), np.float32)}

    def end(self, texts: list[int]) -> None:
        self._ends[self.texts.index(texts)].set()


def test_a_recorded_trace_is_simulated_as_an_inline_front_serves_it(
    recording: Path,
    tmp_path: Path,
    make_front: Callable[..., TextFront],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    front, draw = make_front(), random.Random(0)
    with sending(lambda: front.execute([ids_request([101] * draw.randint(2, 60))]), 0.005):
        assert main(["record", "front", str(tmp_path / "t.csv"), "--seconds", "1", "--build", str(recording)]) == 0
    # So slow that texts wait, and share calls.
    (tmp_path / "p.json").write_text(json.dumps({"lengths": [8, 512], "latency_ms": [20.0, 160.0]}))
    (tmp_path / "s.toml").write_text("[load]\nrate = 1\n[polymorph]\nprofile = 'p.json'\nengine_threads = 2\n")
    capsys.readouterr()
    assert main(["simulate", str(tmp_path / "s.toml"), "--trace", str(tmp_path / "t.csv"), "--json"]) == 0
    recorded = trace.read(tmp_path / "t.csv")
    assert json.loads(capsys.readouterr().out)["as stated"]["requests"] == len(recorded) > 50

    system = scenario.read(tmp_path / "s.toml").systems[scenario.BASE]
    assert isinstance(system, TextSystem)
    log = simulated(system.front([1.0]), system.engines, recorded, {"engine-0": 0, "engine-1": 0})
    held, waiting = HeldCalls(), dict[str, list[int]]()
    monkeypatch.setattr("shapeshift.engines.execution.executor.PROVIDERS", {"emulated": held})
    executor = EngineExecutor(system.engines, tmp_path, ExecutorSettings(engine_threads=2, max_queue_ms=0.0), print)
    assert executor.wait_loaded(60)
    answered: list[TextRequest] = []
    expected: list[list[int]] = []
    try:
        for kind, entry in log:
            if kind == "call":
                worker, waiting[worker] = entry[0], entry[1]
                expected.append(entry[1])
                continue
            wait_for(lambda: len(held.texts) >= len(expected))
            assert sorted(held.texts) == sorted(expected)
            if kind == "end":
                held.end(waiting[entry])
            else:
                ids = np.full(int(recorded.length[entry]), entry + 1)
                executor.submit(TextRequest([ids], answered.append))
        assert max(map(len, held.texts)) > 1 and sorted(sum(held.texts, [])) == [*range(len(recorded))]
        wait_for(lambda: len(answered) == len(recorded))
    finally:
        executor.close()


def test_a_model_that_records_nothing_is_named(
    recording: Path, tmp_path: Path, make_front: Callable[..., TextFront], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "t.csv")
    assert main(["record", "front", file, "--build", str(recording)]) == 2
    assert "is there a server" in capsys.readouterr().err
    make_front()
    assert main(["record", "fornt", file, "--build", str(recording)]) == 2
    assert "those that do: front" in capsys.readouterr().err
    assert main(["record", "front", file, "--seconds", "0.2", "--build", str(recording)]) == 2
    assert "no request arrived and was answered" in capsys.readouterr().err
    assert main(["record", "front", file, "--seconds", "-1", "--build", str(recording)]) == 2
    for wrong in (recording, recording / "absent" / "t.csv"):
        assert main(["record", "front", str(wrong), "--build", str(recording)]) == 2
        assert "FILE.csv: got" in capsys.readouterr().err, "before anything is recorded"


@pytest.mark.server
def test_every_kind_of_front_of_a_server_is_recorded(make_server: Callable[..., TritonServer], tmp_path: Path) -> None:
    models = ("classify_image", "generate_lora", "encode")
    repository = PROJECT / "build" / "repository"
    if any(not (repository / model / "config.pbtxt").is_file() for model in models):
        pytest.skip("run `make engines`")
    build = tmp_path / "build"
    with make_server((repository,), models, build / "run") as server:
        server.wait_ready()
        client = grpc_client.InferenceServerClient(server.grpc_url)
        Image.effect_noise((64, 64), 60).convert("RGB").save(tmp_path / "image.jpg")

        def call(model: str, inputs: dict[str, np.ndarray], **parameters: object) -> None:
            tensors = []
            for name, value in inputs.items():
                kind = "BYTES" if value.dtype == object else "INT32"
                tensors.append(grpc_client.InferInput(name, value.shape, kind))
                tensors[-1].set_data_from_numpy(value)
            client.infer(model, tensors, parameters=parameters)

        def text(value: str) -> np.ndarray:
            return np.array([[value.encode()]], dtype=object)

        def send() -> None:
            image = np.array([[(tmp_path / "image.jpg").read_bytes()]], dtype=object)
            call("encode", {"TEXT": text("two words")}, latency_ms=5000)
            call("classify_image", {"IMAGE": image}, task="animal", latency_ms=700, utility=2)

        with sending(send, 0.1):
            for model in ("encode", "classify_image"):
                file = str(tmp_path / f"{model}.csv")
                assert main(["record", model, file, "--seconds", "2", "--build", str(build)]) == 0
        texts, images = (trace.read(tmp_path / f"{model}.csv") for model in ("encode", "classify_image"))
        assert {*texts.length.tolist()} == {4} and {*texts.latency_ms.tolist()} == {5000.0}
        assert {*images.task.tolist()} == {"animal"} and {*images.utility.tolist()} == {2.0}

        body = {"text_input": "Hello", "max_tokens": 5, "temperature": 0, "lora_name": "sentiment"}
        with sending(lambda: server_post(server.http_url, body), 0.1):
            file = str(tmp_path / "g.csv")
            assert main(["record", "generate_lora", file, "--seconds", "4", "--build", str(build)]) == 0
        generated = trace.read(tmp_path / "g.csv")
        assert {*generated.lora_name.tolist()} == {"sentiment"} and generated.length.min() >= 1
        assert generated.output_length.min() >= 1 and generated.output_length.max() <= 5


def server_post(url: str, body: dict[str, object]) -> None:
    import urllib.request

    request = urllib.request.Request(f"http://{url}/v2/models/generate_lora/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
