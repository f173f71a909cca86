"""Interfaces, restrictions and model control of one real server."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from shapeshift.errors import (
    EngineError,
    InvalidInputError,
    ModelGoneError,
    NotFoundError,
    ShapeshiftError,
    UnsupportedError,
)
from shapeshift.triton import keys, metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded.server import ServerEndedError, TritonServer
from shapeshift.triton.settings import ServerSettings

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(make_settings: Callable[..., ServerSettings]) -> Iterator[TritonServer]:
    with TritonServer(make_settings()) as running:
        yield running.wait_ready()


@pytest.fixture
def control(server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(server.grpc_url, server.key) as connection:
        yield connection


def ask(server: TritonServer, method: str, path: str, key: str = "") -> int:
    """The status of one HTTP call."""
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request(method, path, headers={keys.HTTP_HEADER: key} if key else {})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("client", [grpc_client, http_client])
def test_infers(server: TritonServer, client: object) -> None:
    url = server.grpc_url if client is grpc_client else server.http_url
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = client.InferInput("IN", [2, 3], "FP32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(values)
    connection = client.InferenceServerClient(url)  # type: ignore[attr-defined]
    answer = connection.infer("echo", [tensor]).as_numpy("OUT")
    connection.close()
    assert np.array_equal(answer, values)


RESTRICTED = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/echo_two/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
]


@pytest.mark.parametrize(("method", "path"), RESTRICTED)
def test_the_key_opens_restricted_interfaces(server: TritonServer, method: str, path: str) -> None:
    assert ask(server, method, path) == 403
    assert ask(server, method, path, key="0" * 32) == 403
    assert ask(server, method, path, key=server.key) == 200


@pytest.mark.parametrize("key", ["", "0" * 32])
def test_grpc_requires_the_key(server: TritonServer, key: str) -> None:
    headers = {keys.GRPC_HEADER: key} if key else {}
    connection = grpc_client.InferenceServerClient(server.grpc_url)
    for call in (
        connection.get_model_repository_index,
        connection.get_system_shared_memory_status,
        connection.get_trace_settings,
        connection.get_log_settings,
        lambda headers: connection.load_model("echo", headers=headers),
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            call(headers=headers)
    connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/echo",
        "/v2/models/echo/ready",
        "/v2/models/echo/config",
        "/v2/models/echo/stats",
        "/v2/models/stats",
    ],
)
def test_other_interfaces_need_no_key(server: TritonServer, path: str) -> None:
    assert ask(server, "GET", path) == 200


def test_listens_on_loopback_only(server: TritonServer) -> None:
    listening: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].rsplit(":", 1)
            if fields[3] == "0A":
                listening.setdefault(int(port, 16), set()).add(address)
    for number in server.settings.ports.values():
        assert listening[number] <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_metrics_can_be_scraped(server: TritonServer) -> None:
    samples = metrics.scrape(server.metrics_url)
    labels = frozenset({("model", "echo"), ("version", "1")})
    assert samples["nv_inference_request_success", labels] >= 0


def test_record_has_only_the_stubs_and_regions_of_this_run(server: TritonServer) -> None:
    deadline = time.monotonic() + 120
    stubs: list[dict[str, Any]] = []
    while len(stubs) != 1 or not Path(f"/proc/{stubs[0]['pid']}").exists():
        assert time.monotonic() < deadline, "no running stub was recorded"
        time.sleep(0.1)
        record = json.loads(server.settings.record.read_text())
        stubs = [member for member in record["members"] if member["region"]]
    assert record["server"]["pid"] == server.pid
    for stub in stubs:
        assert re.fullmatch(r"shapeshift_[0-9a-f]{12}_.+", stub["region"])
        assert stub["region"].startswith(record["prefix"])
        assert (Path("/dev/shm") / stub["region"]).exists()
        assert stub["region"] in record["regions"]
        assert "stub" in Path(f"/proc/{stub['pid']}/cmdline").read_text()


def test_key_is_neither_in_log_nor_record(server: TritonServer) -> None:
    for file in (server.settings.log, server.settings.record):
        assert server.key not in file.read_text()


def test_model_control(control: ModelControl) -> None:
    assert control.version().startswith("2.")
    control.load("echo_two")
    assert control.is_ready("echo_two")
    config = control.config("echo_two")
    config["parameters"] = {"bin": {"string_value": "64"}}
    control.load("echo_two", config)
    assert control.config("echo_two")["parameters"]["bin"]["string_value"] == "64"
    assert control.parameters("echo_two")["bin"] == "64"
    assert {model.state for model in control.index() if model.name == "echo_two"} == {"READY"}
    control.unload("echo_two")
    control.wait_unloaded("echo_two")
    assert not control.is_ready("echo_two")


def test_model_control_errors(server: TritonServer, control: ModelControl) -> None:
    with pytest.raises(EngineError, match="cannot load absent"):
        control.load("absent")
    with pytest.raises(NotFoundError, match="absent"):
        control.config("absent")
    for call in (control.load, control.unload, control.config, control.is_ready, control.wait_unloaded):
        with pytest.raises(InvalidInputError, match="model"):
            call("../echo")
    for key in ("", "0" * 32):
        with ModelControl(server.grpc_url, key) as stranger, pytest.raises(UnsupportedError, match="key"):
            stranger.load("echo")
    with ModelControl("127.0.0.1:1", "") as unreachable, pytest.raises(ModelGoneError, match="no server answers"):
        unreachable.version()


def test_model_control_respects_its_timeout(server: TritonServer) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with (
            ModelControl(f"127.0.0.1:{silent.getsockname()[1]}") as control,
            pytest.raises(ShapeshiftError),
        ):
            control.version(timeout_s=0.5)
        assert time.monotonic() - start < 30


def test_a_port_in_use_is_named(
    server: TritonServer, make_settings: Callable[..., ServerSettings], tmp_path: Path
) -> None:
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(server.settings, name)
        settings = make_settings(run_directory=tmp_path, **{name: port})
        with pytest.raises(InvalidInputError, match=rf"{name}: got {port};.*choose another with --"):
            TritonServer(settings).start()


def test_a_run_directory_serves_one_server(make_settings: Callable[..., ServerSettings], server: TritonServer) -> None:
    with pytest.raises(ShapeshiftError, match="is running"):
        TritonServer(make_settings()).start()
    assert server.is_running


def test_unknown_model_and_repository(make_settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="they have: echo, echo_two"):
        TritonServer(make_settings(models=("other",), run_directory=tmp_path)).start()
    with pytest.raises(NotFoundError, match="no model repository"):
        TritonServer(make_settings(repositories=(tmp_path / "absent",), run_directory=tmp_path)).start()


def test_a_failing_model_gives_its_reason(
    make_settings: Callable[..., ServerSettings], add_model: Callable[..., Path], tmp_path: Path
) -> None:
    add_model(tmp_path / "repository", "broken", fail="the weights are missing")
    settings = make_settings(
        repositories=(tmp_path / "repository",), models=("broken",), run_directory=tmp_path / "run"
    )
    with TritonServer(settings) as server, pytest.raises(ServerEndedError, match="the weights are missing"):
        server.wait_ready()
    assert not settings.record.exists()


def test_unpacked_for_another_python(make_settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    (tmp_path / ".unpacked.json").write_text('{"python": "3.8"}')
    with pytest.raises(UnsupportedError, match=r"Python 3\.8.*shapeshift setup"):
        TritonServer(make_settings(triton=tmp_path, run_directory=tmp_path / "run")).start()


def test_starting_a_server_imports_no_client() -> None:
    heavy = "{'tritonclient', 'grpc', 'numpy'}"
    script = f"import sys, shapeshift.triton.embedded.server; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
