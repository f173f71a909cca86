"""The loop of `shapeshift serve`, on servers that are not real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from shapeshift.cli import supervisor
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.settings import ServerSettings


@pytest.mark.parametrize("error", [ShapeshiftError("the server has ended"), ValueError("whatever it is")], ids=repr)
def test_a_server_that_is_started_again_has_the_models_that_were_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
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

        def failed_models(self) -> dict[str, str]:
            return {}

        def require_running(self) -> None:
            if len(started) == 2:
                stop.set()
            elif self._asked:
                raise error
            self._asked = True

        _asked = False

        def stop(self) -> None: ...

    monkeypatch.setattr(supervisor, "TritonServer", Server)
    monkeypatch.setattr(supervisor.Backoff, "pause", lambda self, lasted_s: 0.0)
    settings = ServerSettings(repositories=(tmp_path,), models=("first",), run_directory=tmp_path / "run")
    loop = supervisor.Supervisor(settings, lambda: ["first", "added"], None, 60.0, True, "", lambda text: None)
    assert loop.run(stop) == 0
    assert started == [("first",), ("first", "added")]


class Loaded:
    """A server that is ready, with these models that did not load."""

    http_url = grpc_url = metrics_url = ""

    def __init__(self, failed: dict[str, str]) -> None:
        self._failed = failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def poll_ready(self) -> bool:
        return True

    def failed_models(self) -> dict[str, str]:
        return self._failed

    def failure(self, what: str) -> ShapeshiftError:
        return ShapeshiftError(what)

    def require_running(self) -> None: ...

    def stop(self) -> None: ...


def test_a_model_that_does_not_load_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"bad": "ValueError: no such head"}
    stop, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready: "):
            stop.set()

    monkeypatch.setattr(supervisor, "TritonServer", lambda settings: Loaded(failed))
    settings = ServerSettings(repositories=(tmp_path,), models=("bad", "good"), run_directory=tmp_path / "run")
    loop = supervisor.Supervisor(settings, list, None, 60.0, True, "", say)
    assert loop.run(stop) == 0
    assert "skipping bad, which could not be loaded: ValueError: no such head\n" in said
    (greeting,) = [text for text in said if text.startswith("ready: ")]
    assert "good" in greeting and "bad" not in greeting
    # Without any model there is nothing to serve.
    failed["good"] = "neither"
    with pytest.raises(ShapeshiftError, match="could load no model"):
        supervisor.Supervisor(settings, list, None, 60.0, True, "", say).run(threading.Event())


@pytest.mark.parametrize(
    ("listening", "line"),
    [(True, "OpenAI API: http://127.0.0.1:8080/v1\n"), (False, "the gateway does not answer yet (log: ")],
)
def test_the_gateway_is_started_and_stopped_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listening: bool, line: str
) -> None:
    stop = threading.Event()
    happened: list[str] = []

    class Server:
        http_url = grpc_url = metrics_url = ""

        def __init__(self, settings: ServerSettings) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def require_running(self) -> None: ...

        def poll_ready(self) -> bool:
            return True

        def failed_models(self) -> dict[str, str]:
            return {}

        def stop(self) -> None:
            happened.append("server stops")

    class Child:
        log = tmp_path / "gateway.log"

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> None:
            happened.append("gateway starts")

        def restart_if_ended(self) -> None:
            stop.set()

        def stop(self) -> None:
            happened.append("gateway stops")

    monkeypatch.setattr(supervisor, "TritonServer", Server)

    def listens(port: int) -> bool:
        happened.append(f"asks {port}")
        return listening

    monkeypatch.setattr(supervisor.gateway, "child", lambda settings, port: Child())
    monkeypatch.setattr(supervisor.gateway, "listens", listens)
    monkeypatch.setattr(supervisor, "_GATEWAY_S", 0.0)
    (tmp_path / "run").mkdir()
    settings = ServerSettings(repositories=(tmp_path,), models=(), run_directory=tmp_path / "run")
    settings.log.touch()
    loop = supervisor.Supervisor(settings, list, None, 60.0, False, "", happened.append, 8080)
    assert loop.run(stop) == 0
    (greeting,) = [one for one in happened if one.startswith("ready: ")]
    assert line in greeting
    # A client may call as soon as it reads where the gateway is.
    assert happened.index("asks 8080") < happened.index(greeting)
    acts = [one for one in happened if one.startswith(("gateway", "server"))]
    assert acts == ["gateway starts", "gateway stops", "server stops"]


def test_a_port_in_use_costs_only_the_gateway(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    said: list[str] = []
    loop = supervisor.Supervisor(settings, list, None, 60.0, False, "", said.append, port)
    assert loop._gateway() is not None and said == []
    with socket.create_server(("127.0.0.1", port)):
        assert loop._gateway() is None
    assert f"no gateway: 127.0.0.1:{port} is not available" in said[0]
