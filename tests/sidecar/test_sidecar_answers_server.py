"""A real Triton with a front whose engines start to answer wrongly: the sidecar sees it, and replaces the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeshift.sidecar import run_files
from shapeshift.sidecar.servers import connect
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.sidecar import Sidecar
from shapeshift.triton import metrics
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.sidecar.project import PATIENCE_S, RunningServer, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]
FRONT = "plain"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drifting") / "build"


@pytest.fixture(scope="module")
def running(
    build: Path,
    server_settings: Callable[..., ServerSettings],
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[RunningServer]:
    add_front(build.parent / "model_repository", FRONT, bins="16,64", engine_threads=1)
    generated = build_fronts(build.parent / "model_repository", build)
    drifting = Path(__file__).parent / "drifting"
    with TritonServer(server_settings((generated,), (FRONT,), build / "run", drifting)) as server:
        server.wait_ready(timeout_s=PATIENCE_S)
        yield RunningServer(server)


def counted(running: RunningServer) -> dict[str, float]:
    """The front's answers by code, over all its processes; `latencies`: how many were timed."""
    counts: dict[str, float] = {"latencies": 0.0}
    for (name, labels), value in metrics.scrape(running.server.metrics_url).items():
        code = dict(labels).get("code", "")
        if name == "shapeshift_requests_total" and value:
            counts[code] = counts.get(code, 0.0) + value
        elif name in ("shapeshift_request_latency_ms_count", "shapeshift_request_tokens_count"):
            counts["latencies"] += value
    return counts


@pytest.fixture
def decisions(running: RunningServer, build: Path) -> Iterator[Callable[[], list[str]]]:
    """The decisions of a sidecar that asks as often as it can, each as `SUBJECT: TEXT`."""
    server = running.server
    settings = SidecarSettings(build / "run", (build / "repository",), check_seconds=0.05, check_share=1.0)
    sidecar = Sidecar(settings, lambda _: connect(server.grpc_url, server.metrics_url, server.key), "server test")
    sidecar.start()
    yield lambda: [f"{one['subject']}: {one['text']}" for one in run_files.read_report(build / "run")["decisions"]]
    sidecar.stop()


def test_a_front_that_answers_wrongly_is_reloaded_once_and_counted_apart(
    running: RunningServer, build: Path, decisions: Callable[[], list[str]]
) -> None:
    switch = build / "repository" / FRONT / "wrong"

    def wait_for(text: str, times: int = 1) -> None:
        wait_until(lambda: sum(text in line for line in decisions()) >= times, text)

    try:
        (pid,) = wait_until(lambda: running.pids().get(FRONT), "a heartbeat")
        wait_until(lambda: counted(running).get("CHECK", 0) >= 2, "checks while all is well")
        assert not any("differs" in line for line in decisions())
        switch.write_text(str(pid))
        wait_for("plain: differs: EMBEDDING: cosine")
        wait_for("plain: answers differ: reloading")
        wait_for("plain: answers as it should again")
        wait_until(lambda: counted(running).get("CHECK_WRONG"), "the new process counts the wrong answer")
        assert wait_until(lambda: running.pids().get(FRONT, {pid}) - {pid}, "another process")
        switch.write_text("all")
        wait_for("plain: loaded in", 2)
        wait_for("plain: still differs after a reload: EMBEDDING: cosine")
        wrong = counted(running).get("CHECK_WRONG", 0.0)
        wait_until(lambda: counted(running).get("CHECK_WRONG", 0.0) > wrong, "another check")
        assert sum("reloading" in line for line in decisions()) == 2
        assert counted(running)["latencies"] == 0.0
    finally:
        switch.unlink(missing_ok=True)
