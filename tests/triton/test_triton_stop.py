"""However a server ends, it leaves no process and no shared-memory region."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.triton import metrics
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.server import ServerEndedError, TritonServer
from shapeshift.triton.settings import ServerSettings

pytestmark = [pytest.mark.server, pytest.mark.slow]

Owner = tuple[subprocess.Popen[str], ServerSettings]
Traces = Callable[[ServerSettings], Callable[[], list[str]]]
# A stop takes ten seconds at most where nothing else runs.
_STOPPED_S, _PATIENCE_S = 30.0, 120.0
OWNER = """
import sys, time
from pathlib import Path
from shapeshift.triton.embedded.server import ServerSettings, TritonServer
triton, project, backends, http, grpc, metrics = sys.argv[1:]
settings = ServerSettings(
    repositories=(Path(project) / "repository",), models=("echo",), backend_directories=(Path(backends),),
    triton=Path(triton), run_directory=Path(project) / "run",
    http_port=int(http), grpc_port=int(grpc), metrics_port=int(metrics),
)
with TritonServer(settings) as server:
    server.wait_ready()
    print("ready", flush=True)
    time.sleep(120)
"""


@pytest.fixture(scope="module")
def repository(project: Path, add_model: Callable[..., Path]) -> Path:
    add_model(project / "repository", "slow", delay_s="60")
    return project / "repository"


@pytest.fixture
def server(make_settings: Callable[..., ServerSettings], repository: Path) -> Iterator[TritonServer]:
    with TritonServer(make_settings(repositories=(repository,), models=("echo", "slow"))) as running:
        yield running.wait_ready()


@pytest.fixture
def owner(make_settings: Callable[..., ServerSettings]) -> Iterator[Owner]:
    """Another program with a server that is ready."""
    settings = make_settings()
    folders = [settings.triton, settings.run_directory.parent, settings.backend_directories[0]]
    ports = [str(port) for port in settings.ports.values()]
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *map(str, folders), *ports], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process, settings
    process.kill()
    process.wait()
    process.stdout.close()


def stubs(settings: ServerSettings) -> list[int]:
    """The running recorded stubs, once there are any; a stub that only reads the configuration ends soon."""
    for _ in range(100):
        members = json.loads(settings.record.read_text())["members"]
        found = [member["pid"] for member in members if member["region"]]
        if found and all(Path(f"/proc/{pid}").exists() for pid in found):
            return found
        time.sleep(0.1)
    raise AssertionError("no stub was recorded")


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """The seconds until `condition` held; fails after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "took too long"
        time.sleep(0.05)
    return time.monotonic() - start


def kill_stub(server: TritonServer) -> None:
    os.kill(stubs(server.settings)[0], signal.SIGKILL)
    time.sleep(0.3)


def freeze_stub(server: TritonServer) -> None:
    os.kill(stubs(server.settings)[0], signal.SIGSTOP)


def freeze_server(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def call(server: TritonServer, model: str) -> None:
    """Send one request from a new thread, without waiting for the answer."""
    tensor = grpc_client.InferInput("IN", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))

    def infer() -> None:
        with suppress(InferenceServerException), grpc_client.InferenceServerClient(server.grpc_url) as client:
            client.infer(model, [tensor], client_timeout=120)

    threading.Thread(target=infer, daemon=True).start()
    time.sleep(0.3)


def leave_a_request_with_a_dead_stub(server: TritonServer) -> None:
    freeze_stub(server)
    call(server, "echo")
    kill_stub(server)


def leave_a_long_request_running(server: TritonServer) -> None:
    call(server, "slow")


@pytest.mark.parametrize(
    "harm",
    [
        None,
        kill_stub,
        freeze_stub,
        freeze_server,
        leave_a_request_with_a_dead_stub,
        leave_a_long_request_running,
    ],
    ids=lambda harm: harm.__name__ if harm else "unharmed",
)
def test_stop_leaves_nothing_within_ten_seconds(
    harm: Callable[[TritonServer], None] | None, server: TritonServer, traces_of: Traces
) -> None:
    traces = traces_of(server.settings)
    assert len(traces()) >= 4, "guard, server, stub and region are seen while they exist"
    if harm is not None:
        harm(server)
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < _STOPPED_S
    assert traces() == []
    assert not server.settings.record.exists()
    server.stop()


def test_stop_while_loading(make_settings: Callable[..., ServerSettings], traces_of: Traces) -> None:
    with TritonServer(make_settings()) as server:
        traces = traces_of(server.settings)
        until(lambda: len(traces()) >= 4, 10)
        start = time.monotonic()
    assert time.monotonic() - start < _STOPPED_S
    assert traces() == []


def test_killed_server_is_reported_and_cleaned_up(server: TritonServer, traces_of: Traces) -> None:
    traces = traces_of(server.settings)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.is_running, _PATIENCE_S)
    assert traces() == []
    for _ in range(2):
        with pytest.raises(ServerEndedError, match="SIGKILL"):
            server.require_running()
    server.stop()
    with server:
        # Its metrics port is the last to open.
        assert metrics.scrape(server.wait_ready().metrics_url)


def test_a_server_that_a_signal_has_stopped_goes_on(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    until(lambda: processes.is_suspended(server.pid), _PATIENCE_S)
    until(lambda: not processes.is_suspended(server.pid), _PATIENCE_S)
    server.require_running()
    assert metrics.scrape(server.metrics_url)
    assert "it goes on" in server.settings.log.read_text()


def test_a_killed_guard_ends_the_server(server: TritonServer, traces_of: Traces) -> None:
    traces = traces_of(server.settings)
    os.kill(json.loads(server.settings.record.read_text())["guard"]["pid"], signal.SIGKILL)
    until(lambda: not server.is_running, _PATIENCE_S)
    with pytest.raises(ServerEndedError):
        server.poll_ready()
    until(lambda: traces() == [], _PATIENCE_S)
    server.stop()


def test_stop_after_a_killed_guard(server: TritonServer, traces_of: Traces) -> None:
    traces = traces_of(server.settings)
    freeze_stub(server)
    os.kill(json.loads(server.settings.record.read_text())["guard"]["pid"], signal.SIGKILL)
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < _STOPPED_S
    assert traces() == []


def test_a_frozen_guard_does_not_delay_the_stop(server: TritonServer, traces_of: Traces) -> None:
    traces = traces_of(server.settings)
    os.kill(json.loads(server.settings.record.read_text())["guard"]["pid"], signal.SIGSTOP)
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < _STOPPED_S
    assert traces() == []


def test_a_killed_owner_ends_the_server(owner: Owner, traces_of: Traces) -> None:
    process, settings = owner
    traces = traces_of(settings)
    assert len(traces()) >= 4
    process.kill()
    until(lambda: traces() == [], _PATIENCE_S)


def test_start_right_after_a_killed_owner(owner: Owner, traces_of: Traces) -> None:
    process, settings = owner
    process.kill()
    process.wait()
    with TritonServer(settings) as server:
        server.wait_ready()
        traces = traces_of(settings)
        assert sum("tritonserver" in trace for trace in traces()) == 1
    assert traces() == []


def test_start_cleans_up_when_all_were_killed(owner: Owner, traces_of: Traces) -> None:
    process, settings = owner
    traces = traces_of(settings)
    left = json.loads(settings.record.read_text())
    pids = (*stubs(settings), left["server"]["pid"], left["guard"]["pid"], process.pid)
    # Stop all processes first, so that none cleans up after another one.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    process.wait()
    until(lambda: len(traces()) == 1, _PATIENCE_S)
    assert traces()[0].startswith("/dev/shm/"), "no process is left to remove the region"
    with TritonServer(settings) as server:
        server.wait_ready()
        assert not any(left["prefix"] in trace for trace in traces())


def test_start_cleans_up_when_owner_and_guard_were_killed(owner: Owner, traces_of: Traces) -> None:
    process, settings = owner
    traces = traces_of(settings)
    left = json.loads(settings.record.read_text())
    for pid in stubs(settings):
        os.kill(pid, signal.SIGSTOP)
    for pid in (left["guard"]["pid"], process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    with TritonServer(settings) as server:
        server.wait_ready()
        assert not any(left["prefix"] in trace for trace in traces())
        # It may still be a zombie: its parent has ended, and not every init reaps at once.
        assert processes.look_up(left["server"]["pid"]) is None
