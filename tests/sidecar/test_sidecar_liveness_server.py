"""A real Triton with a front one of whose threads hangs: the sidecar finds it and replaces the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.sidecar.project import PATIENCE_S, Command, RunningServer, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]
FRONT = "plain"


class HangingFront:
    """The front on a running server, and the switch that makes one of its threads hang."""

    def __init__(self, server: TritonServer, folder: Path) -> None:
        self.running = RunningServer(server)
        self.build = folder / "build"
        self._switch = self.build / "repository" / FRONT / "hang"

    def infer(self, timeout_s: float = PATIENCE_S) -> np.ndarray:
        inputs = [grpc_client.InferInput("TEXT", [1, 1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([[b"one text"]], dtype=object))
        with grpc_client.InferenceServerClient(self.running.server.grpc_url) as client:
            return np.array(client.infer(FRONT, inputs, client_timeout=timeout_s).as_numpy("EMBEDDING"))

    def hang(self, thread: str) -> int:
        """Let `thread` of the present process hang at its next step; returns the process's number."""
        (pid,) = wait_until(lambda: self.running.pids().get(FRONT), "a heartbeat")
        self._switch.write_text(f"{thread} {pid}")
        return int(pid)


@pytest.fixture(scope="module")
def front(
    server_settings: Callable[..., ServerSettings],
    tmp_path_factory: pytest.TempPathFactory,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[HangingFront]:
    folder = tmp_path_factory.mktemp("hanging")
    add_front(folder / "model_repository", FRONT, bins="16,64", engine_threads=1)
    generated = build_fronts(folder / "model_repository", folder / "build")
    hanging = Path(__file__).parent / "hanging"
    with TritonServer(server_settings((generated,), (FRONT,), folder / "build" / "run", hanging)) as server:
        server.wait_ready(timeout_s=PATIENCE_S)
        yield HangingFront(server, folder)


@pytest.mark.parametrize("thread", ["engine-0", "responses", "execute"])
def test_a_front_with_a_hanging_thread_is_replaced(front: HangingFront, thread: str, tmp_path: Path) -> None:
    sidecar = Command(tmp_path / "sidecar.log", "sidecar", "--build", str(front.build))
    try:
        expected = front.infer()
        pid = front.hang(thread)
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(front.infer, 5.0)
            sidecar.wait_for(f"thread {thread} of process {pid} has work and has done no step for")
            with pytest.raises(InferenceServerException):
                lost.result()
        sidecar.wait_for(f"health {FRONT}: loaded in")
        np.testing.assert_array_equal(front.infer(), expected)
        wait_until(lambda: front.running.pids().get(FRONT, {pid}).isdisjoint({pid}), "the old process has ended")
        assert sidecar.output.count("loaded in") == 1
    finally:
        sidecar.end()
