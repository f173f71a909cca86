"""The loop of `shapeshift serve`, on servers that are not real."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from shapeshift.cli.gateway import child
from shapeshift.cli.supervisor import Supervisor
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.settings import ServerSettings


def supervise(
    settings: ServerSettings,
    open_server: Callable[..., Any],
    say: Callable[[str], None],
    models: Callable[[], list[str]] = list,
    gateway: Callable[..., Any] | None = None,
    builder: Callable[..., Any] | None = None,
    built: Collection[str] = (),
    sidecar: Callable[..., Any] | None = None,
) -> Supervisor:
    """The loop over what stands for a server and for its gateway; it restarts a server that ends by itself."""

    def says(text: str, level: int = logging.INFO) -> None:
        say(text)

    return Supervisor(settings, open_server, models, 60.0, True, "", says, sidecar, gateway, builder, built)


def add(repository: Path, *names: str) -> None:
    for name in names:
        (repository / name).mkdir()
        (repository / name / "config.pbtxt").touch()


@pytest.mark.parametrize("error", [ShapeshiftError("the server has ended"), ValueError("whatever it is")], ids=repr)
def test_a_server_that_is_started_again_has_the_models_that_were_added(tmp_path: Path, error: Exception) -> None:
    stop = threading.Event()
    started: list[tuple[str, ...]] = []
    (tmp_path / "run").mkdir()
    add(tmp_path, "first", "added")

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

    settings = ServerSettings(repositories=(tmp_path,), models=("first",), run_directory=tmp_path / "run")
    loop = supervise(settings, Server, lambda text: None, lambda: ["first", "added", "without_folder"])
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


def test_a_model_that_does_not_load_is_named_and_left_out(tmp_path: Path) -> None:
    failed = {"bad": "ValueError: no such head"}
    stop, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready: "):
            stop.set()

    settings = ServerSettings(repositories=(tmp_path,), models=("bad", "good"), run_directory=tmp_path / "run")
    loop = supervise(settings, lambda _: Loaded(failed), say)
    assert loop.run(stop) == 0
    assert "skipping bad, which could not be loaded: ValueError: no such head\n" in said
    (greeting,) = [text for text in said if text.startswith("ready: ")]
    assert "good" in greeting and "bad" not in greeting
    # Without any model there is nothing to serve.
    failed["good"] = "neither"
    with pytest.raises(ShapeshiftError, match="could load no model"):
        supervise(settings, lambda _: Loaded(failed), say).run(threading.Event())


class Building(Loaded):
    """A server that starts without models, and has these by the time at which the build has ended."""

    def __init__(self, models: set[str]) -> None:
        super().__init__({})
        self._models = models

    def ready_models(self) -> set[str]:
        return self._models


def process(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)


def test_a_server_is_ready_when_what_is_built_beside_it_is_loaded(tmp_path: Path) -> None:
    add(tmp_path, "good", "bad")
    stop, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready: "):
            assert (tmp_path / "built").exists()
            stop.set()

    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    server = Building({"good", "worker_of_another"})
    loop = supervise(settings, lambda _: server, say, builder=lambda: process(f"sleep 0.3; touch {tmp_path}/built"))
    assert loop.run(stop) == 0
    texts = [text for text in said if text]
    assert texts[0].startswith("Triton runs") and texts[1].startswith("ready: ")
    assert "good" in texts[1] and "bad" not in texts[1] and "worker" not in texts[1]
    with pytest.raises(ShapeshiftError, match="no model could be built and loaded"):
        supervise(settings, lambda _: Building(set()), said.append, builder=lambda: process("exit 1")).run(
            threading.Event()
        )


def load(settings: ServerSettings, *names: str) -> None:
    settings.log.parent.mkdir(exist_ok=True)
    with settings.log.open("a") as log:
        log.writelines(f"I1126 09:00:00.1 1 x.cc:1] successfully loaded '{name}'\n" for name in names)


def test_a_server_that_ends_while_models_are_built_is_started_again_and_the_build_goes_on(tmp_path: Path) -> None:
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    add(tmp_path, "first")
    stop, said, started, builds = threading.Event(), list[str](), list[tuple[str, ...]](), list[Any]()

    class Server(Building):
        def __init__(self, settings: ServerSettings) -> None:
            super().__init__({"first", "second"})
            started.append(settings.models)
            settings.log.unlink(missing_ok=True)

        def require_running(self) -> None:
            if len(started) == 1 and "  first is loaded (0 s)\n" in said:
                add(tmp_path, "second")
                raise ShapeshiftError("the server has ended")
            load(settings, "first")

    def build() -> subprocess.Popen[bytes]:
        builds.append(process(f"while ! [ -e {tmp_path}/go_on ]; do sleep 0.05; done"))
        return builds[0]

    def say(text: str) -> None:
        said.append(text)
        if len(started) == 2 and text.startswith("Triton runs"):
            (tmp_path / "go_on").touch()
        if text.startswith("ready: "):
            assert "first" in text and "second" in text
            stop.set()

    loop = supervise(settings, Server, say, lambda: ["first", "second", "not_yet_built"], builder=build)
    assert loop.run(stop) == 0
    assert started == [(), ("first", "second")] and len(builds) == 1


def test_a_build_that_is_killed_is_said_with_the_models_that_are_missing(tmp_path: Path) -> None:
    add(tmp_path, "first", "second")
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    stop, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("ready: "):
            stop.set()

    build = partial(process, "kill -KILL $$")
    loop = supervise(settings, lambda _: Building({"first"}), say, builder=build, built=["first", "second", "third"])
    assert loop.run(stop) == 0
    assert "the build ended with exit status -9; not loaded: second, third\n" in said


def test_a_server_that_does_not_answer_when_the_build_ends_is_asked_again(tmp_path: Path) -> None:
    add(tmp_path, "first")
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    stop, answers = threading.Event(), [set[str](), set[str](), {"first"}]

    class Server(Building):
        def ready_models(self) -> set[str]:
            return answers.pop(0)

        def require_running(self) -> None:
            if len(answers) == 3:
                load(settings, "first")

    def say(text: str) -> None:
        if text.startswith("ready: "):
            stop.set()

    assert supervise(settings, lambda _: Server(set()), say, builder=partial(process, "")).run(stop) == 0
    assert answers == []


def test_a_sidecar_loads_workers_while_other_models_are_built(tmp_path: Path) -> None:
    add(tmp_path, "front", "front_w00")
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    stop, happened, fronts = threading.Event(), list[str](), list[set[str]]()

    class Sidecar:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> None:
            happened.append("sidecar starts")
            (tmp_path / "started").touch()

        def has_settled(self, of: Collection[str]) -> bool:
            fronts.append({*of})
            return len(fronts) == 3

        def restart_if_ended(self) -> None: ...

        def stop(self) -> None: ...

    def say(text: str) -> None:
        happened.append(text.partition(" ")[0])
        if text.startswith("ready: "):
            stop.set()

    # It ends once the sidecar has been started.
    build = partial(process, f"while ! [ -e {tmp_path}/started ]; do sleep 0.05; done")
    server = Building({"front"})
    loop = supervise(settings, lambda _: server, say, builder=build, sidecar=lambda _: Sidecar())
    assert loop.run(stop) == 0
    assert happened.index("sidecar starts") < happened.index("ready:") and fronts == [{"front"}] * 3


@pytest.mark.parametrize("ends", [False, True])
def test_what_builds_ends_with_the_server(tmp_path: Path, ends: bool) -> None:
    build, stop = process("sleep 600"), threading.Event()

    class Server(Building):
        def require_running(self) -> None:
            if ends:
                raise ShapeshiftError("the server has ended")
            stop.set()

    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    loop = supervise(settings, lambda _: Server(set()), lambda text: None, builder=lambda: build)
    if ends:
        with pytest.raises(ShapeshiftError, match="the server has ended"):
            loop.run(stop)
    else:
        assert loop.run(stop) == 0
    assert build.poll() is not None


@pytest.mark.parametrize(
    ("listening", "line"),
    [(True, "OpenAI API: http://127.0.0.1:8080/v1\n"), (False, "the gateway does not answer yet (log: ")],
)
def test_the_gateway_is_started_and_stopped_with_the_server(tmp_path: Path, listening: bool, line: str) -> None:
    stop = threading.Event()
    happened: list[str] = []

    class Server:
        http_url = grpc_url = metrics_url = ""

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

    class Gateway:
        log, port = tmp_path / "gateway.log", 8080

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> None:
            happened.append("gateway starts")

        def await_listening(self, stop: threading.Event) -> bool:
            happened.append("asked")
            return listening

        def restart_if_ended(self) -> None:
            stop.set()

        def stop(self) -> None:
            happened.append("gateway stops")

    (tmp_path / "run").mkdir()
    settings = ServerSettings(repositories=(tmp_path,), models=(), run_directory=tmp_path / "run")
    settings.log.touch()
    loop = supervise(settings, lambda _: Server(), happened.append, gateway=lambda _: Gateway())
    assert loop.run(stop) == 0
    (greeting,) = [one for one in happened if one.startswith("ready: ")]
    assert line in greeting
    # A client may call as soon as it reads where the gateway is.
    assert happened.index("asked") < happened.index(greeting)
    acts = [one for one in happened if one.startswith(("gateway", "server"))]
    assert acts == ["gateway starts", "gateway stops", "server stops"]


def test_a_port_in_use_costs_only_the_gateway(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    settings = ServerSettings(repositories=(tmp_path,), run_directory=tmp_path / "run")
    assert child(settings, port).port == port
    said, stop = list[str](), threading.Event()
    stop.set()
    with socket.create_server(("127.0.0.1", port)):
        loop = supervise(settings, lambda _: Loaded({}), said.append, gateway=partial(child, port=port))
        assert loop.run(stop) == 0
    assert f"no gateway: 127.0.0.1:{port} is not available" in said[0]
