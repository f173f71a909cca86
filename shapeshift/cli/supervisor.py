"""The loop of `shapeshift serve`: one server, its sidecar and its gateway, until they are told to stop."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shapeshift.child_process import ChildProcess
from shapeshift.cli.examples import summaries
from shapeshift.cli.gateway import GatewayProcess
from shapeshift.cli.sidecar import SidecarProcess
from shapeshift.errors import ShapeshiftError
from shapeshift.loops import Backoff
from shapeshift.sidecar import run_files
from shapeshift.triton.embedded import logs
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import KNOWN_VULNERABILITIES, ServerSettings

_POLL_S = 0.1
# What builds has for its end, seconds.
_GRACE_S = 2.0
# A server that has served is started again almost at once; one that keeps ending is not.
_FIRST_PAUSE_S = 0.1


class FleetNode(Protocol):
    """The node of a fleet that the server is: `fleet.own_node.OwnNode`."""

    name: str

    def server_settings(self, base: ServerSettings) -> ServerSettings:
        """`base` with what the fleet's file says of the node. Raises ShapeshiftError."""

    def metrics_page(self, source: str) -> contextlib.AbstractContextManager[object]:
        """Within the block, other nodes read `source`, the metrics page on loopback. Raises ShapeshiftError."""

    def drain(self, page: str, say: Callable[[str], None]) -> None:
        """Wait until the server with the metrics page `page` has no request in flight."""


class Say(Protocol):
    """Tells who started the server, in lines of text. level: of `logging`."""

    def __call__(self, text: str, level: int = logging.INFO) -> None: ...


class Supervisor:
    """Starts a server, its sidecar and its gateway, starts again what ends by itself, and says what happens.

    open_server, sidecar, gateway: make them for the settings, not started; no sidecar or no gateway where None. models:
    those of a later start, to which `shapeshift add` may have added some. ready_timeout_s: time to load everything.
    restarts: whether a server that ends by itself is started again. last_lines: what `say` gets after the models that
    are ready. builder: starts the process that builds the models `built` and loads each one; the server starts without
    any, and one that is started again meanwhile with those of `models`. node: of a fleet, which offers its metrics page
    to others and is drained before a stop; None for a server alone.
    """

    def __init__(
        self,
        settings: ServerSettings,
        open_server: Callable[[ServerSettings], TritonServer],
        models: Callable[[], Sequence[str]],
        ready_timeout_s: float,
        restarts: bool,
        last_lines: str,
        say: Say,
        sidecar: Callable[[ServerSettings], SidecarProcess] | None = None,
        gateway: Callable[[ServerSettings], GatewayProcess] | None = None,
        builder: Callable[[], subprocess.Popen[bytes]] | None = None,
        built: Collection[str] = (),
        node: FleetNode | None = None,
    ) -> None:
        self._settings = settings
        self._open_server = open_server
        self._models = models
        self._sidecar = sidecar
        self._gateway = gateway
        self._ready_timeout_s = ready_timeout_s
        self._restarts = restarts
        self._last_lines = last_lines
        self._say = say
        # None once all is built.
        self._builder = builder
        self._built = built
        self._build: subprocess.Popen[bytes] | None = None
        self._node = node
        # Monotonic time at which the models, or while some are built the first of them, were ready last; 0 before.
        self._ready_at = 0.0

    def run(self, stop: threading.Event) -> int:
        """Serve until `stop` is set, and return 0. A server that was ready once and ends by itself is started again.

        Raises ServerEndedError for one that ends before it was ready the first time, or if it is not to be restarted.
        """
        try:
            return self._run(stop)
        finally:
            if self._build is not None:
                _end(self._build)

    def _run(self, stop: threading.Event) -> int:
        backoff, count = Backoff(_FIRST_PAUSE_S), 0
        while True:
            ready_before = self._ready_at
            sidecar = self._sidecar(self._settings) if self._sidecar is not None else None
            gateway = self._make_gateway()
            try:
                with (
                    self._open_server(self._settings) as server,
                    sidecar or nullcontext(),
                    gateway or nullcontext(),
                    self._page(),
                ):
                    return self._watch(server, sidecar, gateway, stop)
            except Exception as error:
                # If the first start fails, an option or a model is wrong; later starts are tried again.
                if not self._restarts or not self._ready_at:
                    raise
                count += 1
                lasted_s = time.monotonic() - self._ready_at if self._ready_at != ready_before else 0.0
                pause_s = backoff.pause(lasted_s)
                log = f"the log of the server that ended: {self._settings.log}.1"
                reason = str(error) if isinstance(error, (ShapeshiftError, OSError)) else repr(error)
                self._say(f"{reason}\nrestart {count} in {pause_s:g} s; {log}\n", logging.ERROR)
                if stop.wait(pause_s):
                    return 0
                with contextlib.suppress(ShapeshiftError):
                    models = self._models()
                    # The server does not start with a model that has no folder.
                    self._settings = replace(
                        self._settings, models=tuple(name for name in models if name in self._fronts())
                    )

    def _make_gateway(self) -> GatewayProcess | None:
        """The gateway, not started; None for none, with a line that says why it cannot be started."""
        if self._gateway is None:
            return None
        try:
            return self._gateway(self._settings)
        except ShapeshiftError as error:
            self._say(f"no gateway: {error}\n", logging.WARNING)
            return None

    def _page(self) -> contextlib.AbstractContextManager[object]:
        """The metrics page for other nodes, where the server is a node of a fleet."""
        return self._node.metrics_page(self._settings.metrics_url) if self._node is not None else nullcontext()

    def _watch(
        self,
        server: TritonServer,
        sidecar: SidecarProcess | None,
        gateway: GatewayProcess | None,
        stop: threading.Event,
    ) -> int:
        """Start the others when they are needed and say when the models are ready; returns 0 once `stop` is set.

        Raises ServerEndedError for a server that ends by itself.
        """
        loaded, gateway_line, fronts = logs.LoadedModels(self._settings.log), "", set[str]()
        if self._builder is not None:
            if sidecar is not None:
                sidecar.start()
            gateway_line = self._await_built(server, sidecar, gateway, loaded, stop)
            if stop.is_set():
                return self._stop(server, sidecar, gateway)
            fronts = with_workers(self._settings.repositories, self._settings.models)
        else:
            self._say(f"loading {', '.join(self._settings.models)} (log: {self._settings.log})\n")
        # Only a sidecar that loads workers is needed before the server is ready.
        loader = sidecar if with_workers(self._settings.repositories, self._settings.models) else None
        if loader is not None:
            loader.start()
        if not self._wait_ready(server, loader, fronts, loaded, stop):
            return self._stop(server, sidecar, gateway)
        failed = server.failed_models()
        if failed.keys() >= {*self._settings.models} and failed:
            raise server.failure("could load no model")
        for name, reason in failed.items():
            self._say(f"skipping {name}, which could not be loaded: {reason}\n", logging.WARNING)
        self._ready_at = time.monotonic()
        gateway_line = gateway_line or self._start_gateway(gateway, stop)
        served = [name for name in self._settings.models if name not in failed]
        self._say(self._greeting(server, served, gateway_line))
        if sidecar is not None:
            sidecar.start()
        while not stop.wait(_POLL_S):
            server.require_running()
            for child in (sidecar, gateway):
                if child is not None:
                    child.restart_if_ended()
        return self._stop(server, sidecar, gateway)

    def _await_built(
        self,
        server: TritonServer,
        sidecar: SidecarProcess | None,
        gateway: GatewayProcess | None,
        loaded: logs.LoadedModels,
        stop: threading.Event,
    ) -> str:
        """Wait until the process that builds and loads models has ended, or `stop` is set; returns the gateway's line.

        From then on the settings name what is loaded. Raises ShapeshiftError if that is nothing. A server that ends
        before leaves the process running, which goes on with the next one.
        """
        assert self._builder is not None
        begun = time.monotonic()
        while not server.poll_ready() and not stop.wait(_POLL_S):
            pass
        line = self._start_gateway(gateway, stop)
        self._say(f"Triton runs (log: {self._settings.log}); a model answers once it is loaded\n{line}")
        self._build = self._build or self._builder()
        is_serving, ready = False, set[str]()
        while not stop.wait(_POLL_S):
            server.require_running()
            for child in (sidecar, gateway):
                if child is not None:
                    child.restart_if_ended()
            status = self._build.poll()
            if names := loaded.new():
                seconds = time.monotonic() - begun
                self._say("".join(f"  {name} is loaded ({seconds:.0f} s)\n" for name in names))
                if not is_serving:
                    is_serving, self._ready_at = True, time.monotonic()
            if status is None:
                continue
            ready = self._fronts() & server.ready_models()
            # A server with much to do may not answer in time.
            if ready or not is_serving:
                break
        if not stop.is_set():
            self._builder = None
            self._settings = replace(self._settings, models=tuple(sorted(ready)))
            if status and (missing := ", ".join(sorted({*self._built} - ready))):
                self._say(f"the build ended with exit status {status}; not loaded: {missing}\n")
            if not ready:
                raise ShapeshiftError("no model could be built and loaded")
        return line

    def _fronts(self) -> set[str]:
        """The models that have a folder and are not workers."""
        return run_files.repository_models(self._settings.repositories)[0]

    def _wait_ready(
        self,
        server: TritonServer,
        loader: SidecarProcess | None,
        fronts: Collection[str],
        loaded: logs.LoadedModels,
        stop: threading.Event,
    ) -> bool:
        """Say which models are loaded until all are ready; False if `stop` is set before.

        loader: the sidecar that loads workers, if there are any; fronts: those that may be new to it. Raises
        ShapeshiftError after the time to load.
        """
        start = time.monotonic()
        while not stop.wait(_POLL_S):
            server.require_running()
            if loader is not None:
                loader.restart_if_ended()
            seconds = time.monotonic() - start
            self._say("".join(f"  {name} is loaded ({seconds:.0f} s)\n" for name in loaded.new()))
            if loader.has_settled(fronts) if loader is not None else server.poll_ready():
                return True
            if seconds > self._ready_timeout_s:
                last = f" (sidecar: {loader.last_line()})" if loader is not None else ""
                raise server.failure(f"was not ready after {self._ready_timeout_s:g} s{last}")
        return False

    def _start_gateway(self, gateway: GatewayProcess | None, stop: threading.Event) -> str:
        """The line about the gateway, once it listens, has had the time for it, or `stop` is set; empty for none."""
        if gateway is None:
            return ""
        gateway.start()
        if gateway.await_listening(stop):
            return f"OpenAI API: http://127.0.0.1:{gateway.port}/v1\n"
        return f"the gateway does not answer yet (log: {gateway.log})\n"

    def _stop(self, server: TritonServer, *children: ChildProcess | None) -> int:
        self._say("stopping\n")
        if self._node is not None:
            self._node.drain(server.metrics_url, self._say)
        if self._build is not None:
            _end(self._build)
        for child in children:
            if child is not None:
                child.stop()
        server.stop()
        self._say("stopped\n")
        return 0

    def _greeting(self, server: TritonServer, served: Sequence[str], gateway_line: str) -> str:
        settings = self._settings
        plans = {}
        if with_workers(settings.repositories, settings.models):
            plans = run_files.read_report(settings.run_directory).get("plans", {})
        public = f"warning: other machines can reach this server ({KNOWN_VULNERABILITIES})\n"
        return (
            f"ready: http {server.http_url}, grpc {server.grpc_url}, metrics {server.metrics_url}\n"
            + (public if settings.is_public else "")
            + gateway_line
            + summaries(served, settings.repositories)
            + "".join(f"workers of {name}: {plan['plan']}\n" for name, plan in plans.items())
            + self._last_lines
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def with_workers(repositories: Sequence[Path], models: Sequence[str]) -> set[str]:
    """Those of the models that have workers."""
    return run_files.repository_models(repositories)[1] & {*models}
