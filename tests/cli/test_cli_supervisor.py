"""The loop of `shapeshift serve`, on servers that are not real."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

import pytest

from shapeshift.cli import supervisor
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.settings import ServerSettings


def test_a_server_that_is_started_again_has_the_models_that_were_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    started: list[tuple[str, ...]] = []
    (tmp_path / "run").mkdir()

    class Server:
        """The first one ends by itself once it is ready; the second one until it is told to stop."""

        http_url = grpc_url = metrics_url = ""

        def __init__(self, settings: ServerSettings) -> None:
            self._settings = settings

        def __enter__(self) -> Self:
            started.append(self._settings.models)
            self._settings.log.touch()
            return self

        def __exit__(self, *_: object) -> None: ...

        def poll_ready(self) -> bool:
            return True

        def require_running(self) -> None:
            if len(started) == 2:
                stop.set()
            elif self._asked:
                raise ShapeshiftError("the server has ended")
            self._asked = True

        _asked = False

        def stop(self) -> None: ...

    monkeypatch.setattr(supervisor, "TritonServer", Server)
    monkeypatch.setattr(supervisor.Backoff, "pause", lambda self, lasted_s: 0.0)
    settings = ServerSettings(repositories=(tmp_path,), models=("first",), run_directory=tmp_path / "run")
    loop = supervisor.Supervisor(settings, lambda: ["first", "added"], None, 60.0, True, "", lambda text: None)
    assert loop.run(stop) == 0
    assert started == [("first",), ("first", "added")]
