"""The sidecar as a whole, with a fake server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shapeshift.sidecar import sidecar as sidecar_module
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.sidecar import Sidecar
from tests.sidecar.fakes import FakeServer
from tests.sidecar.fleet import single
from tests.waiting import wait_for


@pytest.mark.parametrize("serves", [True, False])
def test_the_solver_is_loaded_while_a_server_starts_and_not_beside_one_that_serves(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes a second of the processor, from the requests of a server whose sidecar was started again."""
    server = FakeServer()
    server.add_front(models=1)
    server.down = not serves
    if serves:
        server.loaded["enc_w00"] = server.files["enc_w00"]
    for name in server.files:
        (tmp_path / "repository" / name).mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").touch()
    loaded: list[bool] = []

    def warm_up() -> None:
        loaded.append(server.down)
        server.down = False

    monkeypatch.setattr(sidecar_module.plan, "warm_up", warm_up)
    settings = SidecarSettings(tmp_path / "run", (tmp_path / "repository",))
    caplog.set_level(logging.INFO, "shapeshift.sidecar")
    sidecar = Sidecar(settings, lambda journal: single(server), "server x")
    sidecar.start()
    try:
        wait_for(lambda: any("plan enc" in line for line in caplog.messages))
    finally:
        sidecar.stop()
    assert loaded == ([] if serves else [True])
