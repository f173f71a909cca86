"""`shapeshift sidecar --watch-all` beside a real Triton whose models are somebody else's."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.sidecar.project import PATIENCE_S, Command, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]
CONFIG = """
backend: "python"
input [{ name: "TEXT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "ANSWER" data_type: TYPE_STRING dims: [1] }]
"""
STREAMS = "model_transaction_policy { decoupled: true }"
THREADED = 'parameters { key: "threaded" value { string_value: "1" } }'
TWO = 'instance_group [{ name: "pair" kind: KIND_CPU count: 2 }]'
MODELS = {
    **dict.fromkeys(("dies", "stops", "loops", "slow", "breaks", "spared"), ""),
    "streams": STREAMS,
    "threaded": THREADED,
    "two": TWO,
}
HANG_S = 3.0


class Foreign:
    """The server, and the sidecar beside it."""

    def __init__(self, server: TritonServer, repository: Path, sidecar: Command) -> None:
        self.server = server
        self.repository = repository
        self.sidecar = sidecar

    def ask(self, model: str, text: str = "answer", timeout_s: float = PATIENCE_S) -> str:
        inputs = [grpc_client.InferInput("TEXT", [1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([text.encode()], dtype=object))
        with grpc_client.InferenceServerClient(self.server.grpc_url) as client:
            if MODELS[model] != STREAMS:
                return str(client.infer(model, inputs, client_timeout=timeout_s).as_numpy("ANSWER").item().decode())
            answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(model, inputs)
            try:
                result, error = answers.get(timeout=timeout_s)
            finally:
                client.stop_stream(cancel_requests=True)
            if error is not None:
                raise error
            return str(result.as_numpy("ANSWER").item().decode())

    def leave(self, model: str, *texts: str) -> None:
        """Ask, one after the other, and do not wait for the answers."""
        for text in texts:
            threading.Thread(target=self._ask_in_vain, args=(model, text), daemon=True).start()
            time.sleep(0.3)

    def pids(self, model: str) -> set[int]:
        names = {"two": "pair"}
        return {
            stub.identity.pid
            for stub in processes.stubs()
            if stub.server == self.server.pid and stub.instance.startswith(names.get(model, f"{model}_"))
        }

    def lines(self, model: str) -> list[str]:
        return [line for line in self.sidecar.output.splitlines() if f" health {model}: " in line]

    def wait_healed(self, model: str, times: int = 1) -> None:
        self.sidecar.wait_for(f"health {model}: loaded in", times)
        assert self.ask(model) == "fine"

    def _ask_in_vain(self, model: str, text: str) -> None:
        try:
            self.ask(model, text)
        except (InferenceServerException, queue.Empty):
            return


@pytest.fixture(scope="module")
def foreign(
    server_settings: Callable[..., ServerSettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Foreign]:
    folder = tmp_path_factory.mktemp("foreign")
    for name, more in MODELS.items():
        (folder / "repository" / name / "1").mkdir(parents=True)
        (folder / "repository" / name / "config.pbtxt").write_text(f'name: "{name}"{CONFIG}{more}')
        shutil.copy(Path(__file__).parent / "backends" / "foreign" / "model.py", folder / "repository" / name / "1")
    settings = server_settings((folder / "repository",), tuple(MODELS), folder / "run", folder)
    with pytest.MonkeyPatch.context() as patch, TritonServer(settings) as server:
        server.wait_ready(timeout_s=PATIENCE_S)
        patch.setenv("SHAPESHIFT_KEY", server.key)
        options = ["--watch-all", "--hang-seconds", f"{HANG_S:g}", "--most-reloads", "2", "--except", "spared"]
        options += ["--metrics", server.metrics_url, "--build", str(folder / "own"), server.grpc_url]
        sidecar = Command(folder / "sidecar.log", "sidecar", *options)
        try:
            sidecar.wait_for(f"sees the processes of its models, those of process {server.pid}")
            yield Foreign(server, folder / "repository", sidecar)
        finally:
            sidecar.end()


@pytest.mark.parametrize("model", ["dies", "threaded"])
def test_a_model_that_kills_itself_is_reloaded(foreign: Foreign, model: str) -> None:
    others = foreign.pids("slow")
    foreign.leave(model, "die")
    foreign.wait_healed(model)
    assert "has ended: reloading" in foreign.lines(model)[0]
    assert foreign.pids("slow") == others


def test_one_dead_instance_of_two_is_replaced(foreign: Foreign) -> None:
    """The server goes on to give it every other request, which fails."""
    before = foreign.pids("two")
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    foreign.wait_healed("two")
    wait_until(lambda: len(foreign.pids("two") - before) == 2, "two new processes")


def test_a_stopped_model_is_reloaded(foreign: Foreign) -> None:
    before = foreign.pids("stops")
    foreign.leave("stops", "stop")
    foreign.wait_healed("stops")
    assert "its process is suspended (SIGSTOP): reloading" in foreign.lines("stops")[0]
    assert foreign.pids("stops").isdisjoint(before)


@pytest.mark.parametrize("model", ["loops", "streams"])
def test_a_model_that_loops_for_ever_is_reloaded_once_a_request_waits(foreign: Foreign, model: str) -> None:
    before = foreign.pids(model)
    foreign.leave(model, "loop", "answer")
    foreign.wait_healed(model)
    assert f"requests wait, and none has ended for {HANG_S:g} s: reloading" in foreign.lines(model)[0]
    wait_until(lambda: foreign.pids(model).isdisjoint(before), "the old process has ended")


def test_a_slow_model_is_left_alone(foreign: Foreign) -> None:
    before = foreign.pids("slow")
    began = time.monotonic()
    threads = [threading.Thread(target=foreign.ask, args=("slow", f"sleep {HANG_S / 2}")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began > 2 * HANG_S
    assert foreign.lines("slow") == []
    assert foreign.pids("slow") == before


@pytest.mark.long
def test_a_model_that_dies_at_each_load_is_left_alone_in_the_end(foreign: Foreign) -> None:
    broken = foreign.repository / "breaks" / "broken"
    broken.touch()
    foreign.leave("breaks", "die")
    foreign.sidecar.wait_for("health breaks: left alone after 2 reloads in a row: load it by hand")
    assert sum("not loaded: " in line for line in foreign.lines("breaks")) == 2


def test_a_spared_model_is_never_touched(foreign: Foreign) -> None:
    foreign.leave("spared", "die")
    wait_until(lambda: not foreign.pids("spared"), "its process has ended")
    foreign.leave("dies", "die")
    foreign.wait_healed("dies", times=len([line for line in foreign.lines("dies") if "loaded in" in line]) + 1)
    assert foreign.lines("spared") == []
    with pytest.raises(InferenceServerException, match="not healthy"):
        foreign.ask("spared")
