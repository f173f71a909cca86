"""What all commands do alike: where they look, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeshift import files
from shapeshift.cli.main import main

CONFIG = 'parameters { key: "adapters_dir" value { string_value: "../../adapters" } }'


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build folder with a model that serves adapters, of which there are none."""
    (tmp_path / "repository" / "mine" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "mine" / "config.pbtxt").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    "order",
    [
        ["--model", "mine", "--build", "BUILD", "list", "--json"],
        ["list", "--json", "--model", "mine", "--build", "BUILD"],
        ["--model", "other", "--build", "BUILD", "list", "--json", "--model", "mine"],
    ],
)
def test_the_model_may_stand_before_or_after_the_action(
    order: list[str], build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", *(str(build) if part == "BUILD" else part for part in order)]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_tasks_takes_the_model_before_the_action_too(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "mine", "--build", str(build), "register", "task", "--data", "images"]
    assert main(["tasks", *given]) == 2
    assert "model: got 'mine'; must be an image model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["status"], ["adapters", "list"], ["tasks", "register", "x", "--data", "x"], ["examples"]]
)
def test_from_another_folder_a_command_asks_for_the_build_folder(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHAPESHIFT_KEY", raising=False)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "--build" in error and error.count("\n") == 1
    assert "SHAPESHIFT_KEY" not in error


@pytest.mark.parametrize("command", [["adapters", "--model", "mine", "list", "--json"], ["examples"]])
def test_a_reader_that_has_ended_gets_no_traceback(command: list[str], build: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "shapeshift.cli.main", *command, "--build", str(build)]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("command", [["fleet", "manifests", "kubernetes"], ["policy", "--list"]])
def test_a_full_disk_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "shapeshift.cli.main", *command]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    said = f"shapeshift {command[0]}: cannot write or read: No space left on device\n"
    assert (done.stderr, done.returncode) == (said, 2)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["serve", "--host=0.0.0.0", "--allow-public"], "--allow-public is gone: set SHAPESHIFT_ALLOW_PUBLIC=1"),
        (["serve", "--external", "h:1"], "--external is gone: `shapeshift reload --server HOST:PORT MODEL`"),
        (["engines", "--store=/mnt"], "--store is gone: copy build/engines to the other machine"),
        (["gateway", "--max-body-mb", "5"], "--max-body-mb is gone: leave it out, bodies have at most 32 MiB"),
        (["sidecar", "--health-period=2"], "--health-period is gone: leave it out"),
        (["fleet", "upgrade", "fleet.toml", "--timeout", "9"], "--timeout is gone: leave it out"),
        (["fleet", "manifests", "kuberay", "--shared-memory", "2Gi"], "--shared-memory is gone: edit"),
    ],
)
def test_an_option_that_is_gone_is_refused_with_a_hint(
    command: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[signal.Signals], None]]:
    """A function after which this process gets the signal while engines lie in their unfinished folder."""
    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def arrange(number: signal.Signals) -> None:
        def kill(folder: Path) -> None:
            assert folder.name.endswith(".building")
            os.kill(os.getpid(), number)

        monkeypatch.setattr(files, "flush_folder", kill)

    yield arrange
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_build_says_so_in_one_line(
    tmp_path: Path,
    add_front: Callable[..., Path],
    interrupt: Callable[[signal.Signals], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_front(tmp_path / "models", "front")
    command = ["engines", "--repository", str(tmp_path / "models"), "--build", str(tmp_path / "build")]
    interrupt(signal.SIGINT)
    assert main(command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "shapeshift engines: interrupted"
    before = signal.getsignal(signal.SIGTERM)
    interrupt(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 143
    assert capsys.readouterr().err.splitlines()[-1] == "shapeshift engines: stopped by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == before
    assert list((tmp_path / "build" / "engines").iterdir()) == []
    assert (tmp_path / "build" / "kernels").is_dir(), "a container mounts a folder there, where all else is read-only"
