"""A project with a front and workers of the test backend `beat`, a running server of it, and commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shapeshift.sidecar import run_files
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.server import ServerSettings, TritonServer
from shapeshift.triton.model_config import as_json, read
from tests.sidecar.fakes import parameters

PROJECT = Path(__file__).resolve().parents[2]
BACKENDS = Path(__file__).resolve().parent / "backends"
TRITON = PROJECT / "build" / "triton"
CONFIG = """
backend: "beat"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
# Long, because the machine may be busy.
PATIENCE_S = 40.0


def add_model(repository: Path, name: str, **values: object) -> None:
    (repository / name / "1").mkdir(parents=True)
    entries = (
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(str(value))} }} }}'
        for key, value in values.items()
    )
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"{CONFIG}' + "\n".join(entries))


def wait_until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"timeout: {what}"
        time.sleep(0.05)
    return found


class Project:
    """A build folder with a repository: front `enc` with three workers of four, all of the backend `beat`."""

    def __init__(self, folder: Path, server_settings: Callable[..., ServerSettings]) -> None:
        self.build = folder / "build"
        self.run = self.build / "run"
        self.repository = self.build / "repository"
        self.figures = folder / "figures.json"
        shape = parameters(workers=3, plan_histogram="[9, 0, 1]", beat_s=0.1, generation=0, figures=self.figures)
        add_model(self.repository, "enc", **shape)
        for number in range(4):
            # No worker can load the middle bin.
            own = {"worker_of": "enc", "bin": 512, "generation": 0, "beat_s": 0.1, "fail_bin": 128}
            add_model(self.repository, f"enc_w{number:02d}", **own)
        assert as_json(read(self.repository / "enc_w00" / "config.pbtxt"))["parameters"]["bin"]
        self.build.joinpath("triton").symlink_to(TRITON)
        self.settings = server_settings((self.repository,), ("enc",), self.run, BACKENDS)

    def set_texts(self, lengths: Mapping[int, int]) -> None:
        """Let the front export these totals of texts by bin."""
        total, rows = 0, []
        for edge, count in sorted(lengths.items()):
            total += count
            rows.append([{"le": str(edge)}, total])
        draft = self.figures.with_suffix(".draft")
        draft.write_text(json.dumps({"shapeshift_request_tokens_bucket": rows}))
        draft.replace(self.figures)

    def report(self) -> dict[str, Any]:
        return run_files.read_report(self.run)


class RunningServer:
    """A running server of the project and queries about its models."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.control = ModelControl(server.grpc_url, server.key)

    def workers(self, name: str = "bin") -> dict[str, str]:
        """One parameter of each loaded worker."""
        ready = sorted(one.name for one in self.control.index() if one.state == "READY" and "_w" in one.name)
        return {worker: self.control.config(worker)["parameters"][name]["string_value"] for worker in ready}

    def pids(self) -> dict[str, set[int]]:
        """The running processes of each model that have a heartbeat."""
        found: dict[str, set[int]] = {}
        for (name, labels), _ in metrics.scrape(self.server.metrics_url).items():
            own = dict(labels)
            if name == "shapeshift_heartbeat_total" and processes.stub(int(own["pid"])) is not None:
                found.setdefault(own["model"], set()).add(int(own["pid"]))
        return found

    def kill(self, model: str) -> int:
        """Kill the model's process once it has a heartbeat; returns its pid."""
        (pid,) = wait_until(lambda: self.pids().get(model), f"{model} has a heartbeat")
        os.kill(pid, signal.SIGKILL)
        return pid


class Command:
    """`shapeshift COMMAND` on the build folder, with its output in a log file."""

    def __init__(self, log: Path, *arguments: str, **options: Any) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shapeshift.cli.main", *arguments],
                stdout=file,
                stderr=file,
                cwd=PROJECT,
                env={**os.environ, "PYTHONPATH": str(PROJECT)},
                **options,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.output.count(text) >= times or self.process.poll() is not None, text)
        assert self.output.count(text) >= times, self.output

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)
