"""`generate_lora` and `generate_lora_unary` in a real Triton, over a small random model and random adapters."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.cli import main as cli
from shapeshift.files import replace_text
from shapeshift.triton import metrics, model_config
from tests import waiting
from tests.adapter_cache.lora_models import Spec, make_adapter
from tests.compiled import link_kernels

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PROJECT = Path(__file__).resolve().parents[2]
PROMPT = "Return the number of"
COUNT = 16


@pytest.fixture(scope="module")
def project(small_base: Path, mixed_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of two fronts whose registry is filled by the build; its build folder."""
    from shapeshift.build_engines import decode
    from shapeshift.build_engines.paths import BuildPaths
    from shapeshift.build_engines.repository import front_models

    root = tmp_path_factory.mktemp("project")
    paths = BuildPaths(root, root / "build", root / "model_repository")
    link_kernels(paths.build)
    starters = mixed_adapters["small"].parent
    for name in ("generate_lora", "generate_lora_unary"):
        config = model_config.read(PROJECT / "tests" / "model_repository" / name / "config.pbtxt")
        if name == "generate_lora":
            stated = {"checkpoint": small_base, "starter_dir": starters, "precision": "f32", "adapter_mb": 1}
            stated |= {"adapter_sources": root / "shelf"}
            for key, value in {**stated, "max_length": 256, "max_concurrency": 8}.items():
                model_config.set_parameter(config, key, str(value))
        (paths.repository / name / "1").mkdir(parents=True)
        model_config.write(config, paths.repository / name / "config.pbtxt")
    fixed = {"from_file": str(mixed_adapters["queries"])}
    (paths.repository / "generate_lora" / "1" / "multi_lora.json").write_text(json.dumps(fixed))
    for front in front_models(paths, set()):
        assert isinstance(front, decode.DecodeFrontConfig)
        decode.publish(front, paths, lambda step: None)
    return paths.build


@pytest.fixture(scope="module")
def server(
    project: Path, make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    models = ("generate_lora", "generate_lora_unary")
    with make_server((project / "repository",), models, tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def peft_answers(small_base: Path, mixed_adapters: dict[str, Path]) -> dict[str | None, str]:
    """What PEFT says greedily with each adapter, and without one."""
    from tests.adapter_cache.lora_models import peft_texts

    made = peft_texts(small_base, mixed_adapters, PROMPT, COUNT)
    return made | {"from_file": made["queries"]}


@pytest.fixture
def adapters(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs `shapeshift adapters` on the project; its output."""

    def run(*arguments: str, status: int = 0) -> str:
        assert cli.main(["adapters", "--build", str(project), *arguments]) == status
        said = capsys.readouterr()
        return said.out if status == 0 else said.err

    return run


def post(server: TritonServer, name: str | None, **fields: Any) -> tuple[int, dict[str, Any]]:
    given = {"text_input": PROMPT, "temperature": 0.0, "max_tokens": COUNT, **fields}
    body = given if name is None else {**given, "lora_name": name}
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("POST", "/v2/models/generate_lora/generate", json.dumps(body))
    answer = connection.getresponse()
    content = json.loads(answer.read().decode())
    connection.close()
    return answer.status, content


def plain(server: TritonServer, name: str | None, count: int = COUNT) -> str:
    """The same as a plain request over gRPC."""
    inputs = [
        grpc_client.InferInput("text_input", [1], "BYTES"),
        grpc_client.InferInput("max_tokens", [1], "INT32"),
        grpc_client.InferInput("temperature", [1], "FP32"),
    ]
    values = (np.array([PROMPT.encode()], dtype=object), np.array([count], np.int32), np.array([0], np.float32))
    for tensor, value in zip(inputs, values, strict=True):
        tensor.set_data_from_numpy(value)
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        parameters = None if name is None else {"lora_name": name}
        answer = client.infer("generate_lora_unary", inputs, parameters=parameters, client_timeout=60)
    return str(answer.as_numpy("text_output")[0].decode())


def metric(server: TritonServer, name: str, **labels: str) -> float:
    wanted = {*labels.items(), ("model", "generate_lora")}
    samples = metrics.scrape(server.metrics_url).items()
    return sum(value for (series, own), value in samples if series == f"shapeshift_{name}" and wanted <= own)


def test_every_way_says_what_peft_says(server: TritonServer, peft_answers: dict[str | None, str]) -> None:
    for name, text in peft_answers.items():
        status, answer = post(server, name)
        assert (status, answer["text_output"]) == (200, text)
        assert plain(server, name) == text
    named = json.dumps({"lora_name": "small"})
    assert post(server, None, sampling_parameters=named)[1]["text_output"] == peft_answers["small"]


def test_an_adapter_of_an_allowed_folder_is_fetched_when_a_request_names_it(
    server: TritonServer, project: Path, small_base: Path
) -> None:
    from tests.adapter_cache.lora_models import peft_texts

    shelf = project.parent / "shelf"
    folders = {name: make_adapter(shelf / name, small_base, Spec(7), seed=30) for name in ("first", "second")}
    expected = peft_texts(small_base, folders, PROMPT, COUNT)
    status, answer = post(server, "first")
    assert (status, answer.get("text_output")) == (200, expected["first"]), answer
    assert plain(server, "second") == expected["second"]
    status, answer = post(server, "third")
    assert status == 400 and "no adapter 'third'; neither registered nor a folder of adapter_sources" in answer["error"]


def test_many_at_once_say_what_each_says_alone(server: TritonServer, peft_answers: dict[str | None, str]) -> None:
    names = list(peft_answers) * 6
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda name: post(server, name)[1]["text_output"], names))
    assert answers == [peft_answers[name] for name in names]
    wait_for(lambda: metric(server, "adapter_requests_total", adapter="large") >= 6)
    assert metric(server, "adapter_hits_total") > metric(server, "adapter_misses_total") >= 6


def test_unknown_names_are_refused(server: TritonServer) -> None:
    status, answer = post(server, "nobody")
    assert status == 400 and "no adapter 'nobody'; neither registered" in answer["error"]
    status, answer = post(server, "../small")
    assert status == 400 and "lora_name" in answer["error"]
    with pytest.raises(InferenceServerException, match="no adapter 'nobody'") as refused:
        plain(server, "nobody")
    assert refused.value.status() == "StatusCode.NOT_FOUND"


def test_the_status_over_http_depends_on_the_endpoint(server: TritonServer) -> None:
    """Triton's generate extension answers 400 to every error; docs/fused_decode.md says so."""
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    for parameters, status in (({"lora_name": "nobody"}, 404), ({"latency_ms": 0.0001}, 503)):
        assert post(server, None, **parameters)[0] == 400
        body = json.dumps({"inputs": [text], "parameters": parameters})
        connection = http.client.HTTPConnection(server.http_url, timeout=60)
        connection.request("POST", "/v2/models/generate_lora_unary/infer", body)
        assert connection.getresponse().status == status
        connection.close()


def test_adapters_come_and_go_while_others_run(
    server: TritonServer,
    project: Path,
    small_base: Path,
    peft_answers: dict[str | None, str],
    adapters: Callable[..., str],
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    said: list[tuple[str | None, str]] = []

    def go_on(name: str | None) -> None:
        while not stop.is_set():
            said.append((name, post(server, name)[1]["text_output"]))

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(go_on, name) for name in ("small", "large", None)]
        try:
            adapters("add", "late", str(make_adapter(tmp_path / "late", small_base, Spec(7), seed=5)), "--pin")
            assert "late" in adapters("list") and "pinned" in adapters("list")
            wait_for(lambda: post(server, "late")[0] == 200)
            first = post(server, "late")[1]["text_output"]
            adapters("add", "late", str(make_adapter(tmp_path / "other", small_base, Spec(9), seed=6)))
            wait_for(lambda: post(server, "late")[1].get("text_output") != first)
            adapters("remove", "late")
            wait_for(lambda: "no adapter 'late'" in post(server, "late")[1].get("error", ""))
        finally:
            stop.set()
        for one in running:
            one.result()
    assert len(said) > 10
    assert all(text == peft_answers[name] for name, text in said)


def test_what_cannot_be_served_is_refused_by_the_command(
    server: TritonServer, small_base: Path, adapters: Callable[..., str], tmp_path: Path
) -> None:
    wrong = make_adapter(tmp_path / "wrong", small_base, Spec(4), base_model_name_or_path="owner/other")
    assert "base_model_name_or_path" in adapters("add", "wrong", str(wrong), status=2)
    assert "letters, digits" in adapters("add", "../wrong", str(wrong), status=2)
    assert "no adapter 'nobody'; known: attention" in adapters("remove", "nobody", status=3)
    assert "got 129" not in adapters("list") and "wrong" not in adapters("list")
    large = make_adapter(tmp_path / "large", small_base, Spec(65))
    assert "a rank of 1 to max_rank (64)" in adapters("add", "big", str(large), status=2)


def test_a_bad_entry_is_told_of_and_changes_nothing(
    server: TritonServer, project: Path, peft_answers: dict[str | None, str]
) -> None:
    before = metric(server, "adapter_refusals_total")
    file = project / "adapters" / "generate_lora" / "registry.json"
    whole = file.read_text()
    content = json.loads(whole)
    content["entries"]["odd"] = {"folder": "../../..", "sha256": "0", "pinned": False}
    content["entries"]["from_file"] = content["entries"]["small"]
    replace_text(file, json.dumps(content))
    wait_for(lambda: metric(server, "adapter_refusals_total") == before + 2)
    assert "no adapter 'odd'" in post(server, "odd")[1]["error"]
    for name in ("small", "from_file"):
        assert post(server, name)[1]["text_output"] == peft_answers[name]
    replace_text(file, whole)


def test_what_runs_is_told(server: TritonServer) -> None:
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            post(server, "small", max_tokens=200, ignore_eos=True)

    def answer_of() -> bool:
        found = [dict(own) for series, own in metrics.scrape(server.metrics_url) if series.endswith("requests_info")]
        # None while one is replaced by the next.
        assert len(found) <= 1 and all(one["max_lora"] == "8" for one in found)
        return [one["running_lora_adapters"] for one in found] == ["small"]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(go_on)
        try:
            wait_for(answer_of)
        finally:
            stop.set()
