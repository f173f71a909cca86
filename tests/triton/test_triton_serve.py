"""`shapeshift serve` as a user runs it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shapeshift.cli import main
from shapeshift.engines import failures
from shapeshift.triton.embedded import command_line
from shapeshift.triton.embedded.server import ServerEndedError, TritonServer
from shapeshift.triton.settings import ALLOW_PUBLIC, ServerSettings
from tests.compiled import link_kernels
from tests.engines.families import save_model, save_modules

PROJECT = Path(__file__).resolve().parents[2]
BACKENDS = Path(__file__).resolve().parent / "backends"
COMMAND = [sys.executable, "-m", "shapeshift.cli.main", "serve"]
Traces = Callable[[ServerSettings], Callable[[], list[str]]]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--host", "0.0.0.0"], "CVE-2025-23310"),
        (["--host", "0.0.0.0"], f"{ALLOW_PUBLIC}=1"),
        (["--models", "../x"], "model: got"),
        (["--http-port", "8001"], "must differ"),
        (["--repository", "absent"], "no model repository at absent; run `shapeshift engines`"),
        (["--engines", "--strict"], "--strict: got True; does not go with --engines: run `shapeshift engines` before"),
        (["--engines", "--models", "encoed"], "no model encoed in"),
    ],
)
def test_known_errors_are_one_line(
    arguments: list[str],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ALLOW_PUBLIC, raising=False)
    (tmp_path / "repository" / "m").mkdir(parents=True)
    (tmp_path / "repository" / "m" / "config.pbtxt").touch()
    assert main.main(["serve", "--build", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_only_configurations_of_other_folders_are_completed(
    tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    model, triton, log = tmp_path / "repository" / "m", tmp_path / "triton", tmp_path / "options"
    for folder in (model, triton / "backends", triton / "bin"):
        folder.mkdir(parents=True)
    (model / "config.pbtxt").touch()
    # It lists its options, or notes those that it got and ends.
    options = "".join(f"  --{name} <x>\n" for name in {*command_line.REQUIRED_OPTIONS, command_line.AS_WRITTEN})
    server = triton / "bin" / "tritonserver"
    server.write_text(f'#!/bin/sh\n[ "$1" = --help ] && cat <<END || echo "$@" >> {log}\n{options}END\n')
    server.chmod(0o755)
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    for more in ([], ["--repository", str(tmp_path / "repository")]):
        assert main.main(["serve", "--build", str(tmp_path), "--no-gateway", "--no-sidecar", *ports, *more]) == 1
    first, second = log.read_text().splitlines()
    assert f"--{command_line.AS_WRITTEN}" in first.split() and f"--{command_line.AS_WRITTEN}" not in second.split()


@pytest.mark.parametrize(
    ("arguments", "served", "said"),
    [
        ([], ["good"], ["skipping bad, which could not be built: no folder"]),
        (["--models", "good"], ["good"], []),
        (["--models", "good,bad"], ["good"], ["skipping bad, which could not be built: no folder"]),
        (["--models", "bad"], None, ["bad could not be built: no folder"]),
        (["--strict"], None, ["bad could not be built: no folder"]),
        (["--strict", "--models", "good"], ["good"], []),
    ],
)
def test_a_model_that_could_not_be_built_is_skipped(
    arguments: list[str],
    served: list[str] | None,
    said: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("good", "bad"):
        # There is an older build of `bad`, which does not match its config.pbtxt.
        (tmp_path / "repository" / name).mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").touch()
    failures.record(tmp_path, {"bad": "no folder"})
    status = main.main(["serve", "--build", str(tmp_path), "--print-models", *arguments])
    out, err = capsys.readouterr()
    assert (status, out.split()) == ((0, served) if served else (2, []))
    assert [line.removeprefix("shapeshift serve: ") for line in err.splitlines()] == said


class Served:
    """A running `shapeshift serve`, its output and its settings."""

    def __init__(self, process: subprocess.Popen[str], settings: ServerSettings) -> None:
        self.process = process
        self.settings = settings
        self.output = ""

    def read_until(self, part: str) -> None:
        assert self.process.stdout is not None
        while part not in self.output:
            line = self.process.stdout.readline()
            assert line, f"ended before writing {part!r}: {self.output}"
            self.output += line

    def end(self, *signals: signal.Signals) -> tuple[int, float]:
        """Send the signals; returns the exit status and the seconds until the end."""
        start = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.process.wait(timeout=120), time.monotonic() - start


@pytest.fixture
def served(
    request: pytest.FixtureRequest, make_settings: Callable[..., ServerSettings], project: Path, triton: Path
) -> Iterator[Served]:
    """`shapeshift serve` with the parameter's further options."""
    settings = make_settings(run_directory=project / "build" / "run")
    (project / "build").mkdir(exist_ok=True)
    if not (project / "build" / "triton").exists():
        (project / "build" / "triton").symlink_to(triton)
    arguments = ["--no-gateway", "--build", str(project / "build"), "--repository", str(project / "repository")]
    arguments += ["--backends", str(settings.backend_directories[0]), *getattr(request, "param", [])]
    for name, port in settings.ports.items():
        arguments += [f"--{name}-port", str(port)]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT
    )
    yield Served(process, settings)
    process.kill()
    process.communicate()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 3], ids=["Ctrl-C", "SIGTERM", "Ctrl-C thrice"]
)
def test_serves_until_a_signal(
    signals: list[signal.Signals], served: Served, traces_of: Traces, capsys: pytest.CaptureFixture[str]
) -> None:
    served.read_until("Ctrl-C stops the server")
    loading, _, ready = served.output.partition("ready: ")
    assert sorted(line.split()[0] for line in loading.splitlines() if " is loaded (" in line) == ["echo", "echo_two"]
    assert ready.startswith(f"http 127.0.0.1:{served.settings.http_port}")
    models, calls = ready.splitlines()[1:3], ready.splitlines()[3]
    assert models == ["echo", "echo_two"], "one line a model"
    command = shlex.split(calls.removeprefix("how to call them: "))
    assert main.main([*command[1:], "echo_two"]) == 0
    ready_url = f"http://127.0.0.1:{served.settings.http_port}/v2/models/echo_two/ready"
    assert capsys.readouterr().out == f"echo_two\ncurl -i {ready_url}\n"
    traces = traces_of(served.settings)
    assert len(traces()) >= 4
    status, seconds = served.end(*signals)
    assert (status, seconds < 30) == (0, True)
    assert traces() == []


@pytest.mark.server
def test_stops_while_loading(served: Served) -> None:
    served.read_until("loading")
    status, seconds = served.end(signal.SIGINT)
    assert (status, seconds < 30) == (0, True)


@pytest.mark.server
def test_a_dead_server_is_started_again(served: Served, traces_of: Traces) -> None:
    served.read_until("Ctrl-C stops the server")
    traces = traces_of(served.settings)
    first = set(traces())
    for number in (1, 2):
        kill_server(served)
        served.read_until(f"restart {number} in ")
        begun = time.monotonic()
        served.read_until("loading echo, echo_two")
        assert time.monotonic() - begun < 60
        served.output = ""
        served.read_until("Ctrl-C stops the server")
    assert not first & set(traces()), "nothing of the first server is left"
    assert served.end(signal.SIGTERM)[0] == 0


@pytest.mark.server
@pytest.mark.parametrize("served", [["--no-restart"]], indirect=True)
def test_a_dead_server_is_reported(served: Served, traces_of: Traces) -> None:
    served.read_until("Ctrl-C stops the server")
    traces = traces_of(served.settings)
    kill_server(served)
    assert served.process.wait(timeout=120) == 1
    assert served.process.stderr is not None
    error = served.process.stderr.read()
    assert "ended by itself (killed by SIGKILL)" in error
    assert str(served.settings.log) in error
    assert traces() == []


def kill_server(served: Served) -> None:
    os.kill(json.loads(served.settings.record.read_text())["server"]["pid"], signal.SIGKILL)


@pytest.mark.server
def test_models_are_loaded_as_they_are_built(
    triton: Path, tmp_path: Path, server_settings: Callable[..., ServerSettings], traces_of: Traces
) -> None:
    save_modules(save_model(tmp_path / "checkpoint", "bert"), "cls")
    link_kernels(tmp_path / "build")
    built, spread = {"checkpoint": tmp_path / "checkpoint"}, {"placement": "resident", "workers": 1, "max_workers": 1}
    for name, stated in (("bad", {"checkpoint": tmp_path / "absent"}), ("front", built | spread), ("good", built)):
        (tmp_path / "model_repository" / name).mkdir(parents=True)
        parameters = {"max_tokens": 16, "max_bins": 1, "precision": "f32", **stated}
        items = ", ".join(f'{{ key: "{key}" value {{ string_value: "{one}" }} }}' for key, one in parameters.items())
        text = f'backend: "polymorph" parameters [ {items} ]'
        (tmp_path / "model_repository" / name / "config.pbtxt").write_text(text)
    settings = server_settings((tmp_path / "build" / "repository",), (), tmp_path / "build" / "run", BACKENDS)
    options = ["--engines", "--no-gateway", "--triton", str(triton)]
    options += [f"--{name}-port={port}" for name, port in settings.ports.items()]
    process = subprocess.Popen(
        [*COMMAND, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    served = Served(process, settings)
    try:
        served.read_until("Ctrl-C stops the server")
        begin, _, ready = served.output.partition("ready: ")
        assert "\nbad: " in begin and "not published: bad" in begin and "  good is loaded (" in begin
        assert "  front is loaded (" in begin and "  front_w00 is loaded (" in begin
        assert "\nfront  engines: " in ready and "\ngood   engines: " in ready
        traces = traces_of(settings)
        assert served.end(signal.SIGINT)[0] == 0 and traces() == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.server
def test_a_model_that_does_not_load_is_left_out_in_a_folder_with_a_space(
    triton: Path,
    tmp_path: Path,
    add_model: Callable[..., Path],
    server_settings: Callable[..., ServerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "a project"
    add_model(folder / "repository", "bad", fail="no such head")
    add_model(folder / "repository", "good")
    settings = server_settings((folder / "repository",), ("bad", "good"), folder / "run", BACKENDS)
    with TritonServer(replace(settings, keep_going=True)) as server:
        server.wait_ready(timeout_s=60)
        assert server.failed_models() == {"bad": "RuntimeError: no such head"}
    with TritonServer(settings) as server, pytest.raises(ServerEndedError, match="no such head"):
        server.wait_ready(timeout_s=60)


@pytest.mark.server
def test_a_closed_pipe_does_not_stop_it(served: Served) -> None:
    served.read_until("loading")
    assert served.process.stdout is not None
    served.process.stdout.close()
    time.sleep(4)
    assert served.process.poll() is None
    assert served.end(signal.SIGTERM)[0] == 0
    served.process.stdout = None


def test_the_models_that_a_front_calls_are_loaded_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = {
        "generate": 'backend: "fused_decode"',
        "unary": 'backend: "fused_decode" parameters { key: "forward_to" value { string_value: "generate" } }',
        "broken": "backend",
    }
    for name, text in configs.items():
        (tmp_path / "repository" / name).mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").write_text(text)
    assert main.main(["serve", "--build", str(tmp_path), "--print-models", "--models", "broken,unary"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["broken", "unary", "generate"]
    assert "shapeshift serve: unary needs generate: loading it too" in err.splitlines()
