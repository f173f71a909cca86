"""The stamp of a peer's environment: made once, made anew for other files, never trusted half made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from bench.peers import venv
from bench.peers.venv import TORCH_INDEX, PeerVenv, tail, without_torch
from shapeshift.errors import UnsupportedError


class FakeCommands:
    """Stands for subprocess.run: notes each command, makes the interpreter, fails where `fails` says so."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.fails: Callable[[list[str]], bool] = lambda command: False

    def __call__(
        self,
        command: list[str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: dict[str, str],
        cwd: None,
        check: bool,
    ) -> subprocess.CompletedProcess[bytes]:
        self.seen.append(command)
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        stdout.write(b"what pip said\n")
        return subprocess.CompletedProcess(command, 7 if self.fails(command) else 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fake = FakeCommands()
    monkeypatch.setattr("bench.peers.venv.subprocess.run", fake)
    return fake


@pytest.fixture
def peer(tmp_path: Path) -> PeerVenv:
    torch, requirement = tmp_path / "torch.txt", tmp_path / "peer.txt"
    torch.write_text("torch==1\n")
    requirement.write_text("other==2\n")
    return PeerVenv("some-peer", requirement, tmp_path / "build", torch)


def test_is_made_once_torch_first_and_without_dependencies(commands: FakeCommands, peer: PeerVenv) -> None:
    assert not peer.is_ready()
    python = peer.ensure()
    assert python == peer.build / "peers" / "some-peer" / "bin" / "python"
    assert peer.is_ready()
    _, torch, rest = commands.seen
    assert torch[-2:] == ["-r", str(peer.torch)] and TORCH_INDEX in torch
    assert rest[-2:] == ["-r", str(peer.requirement)] and TORCH_INDEX not in rest
    assert all({"--no-deps", "--no-compile"} <= set(command) for command in (torch, rest))

    peer.ensure()
    assert len(commands.seen) == 3


def test_a_peer_may_do_without_torch(commands: FakeCommands, peer: PeerVenv) -> None:
    bare = replace(peer, torch=None)
    assert bare.digest() != peer.digest()
    bare.ensure()
    _, rest = commands.seen
    assert rest[-2:] == ["-r", str(bare.requirement)] and bare.is_ready() and not peer.is_ready()


def test_an_environment_is_made_by_a_command(
    commands: FakeCommands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("clients", "llama-cpp"):
        assert venv.main([name, "--build", str(tmp_path)]) == 0 and without_torch(name, tmp_path).is_ready()
    commands.fails = lambda command: True
    assert (
        venv.main(["aiperf", "--build", str(tmp_path)]) == 2
        and "environment of peer 'aiperf'" in capsys.readouterr().err
    )


@pytest.mark.parametrize("changed", ["torch", "requirement"])
def test_another_requirement_makes_it_anew(commands: FakeCommands, peer: PeerVenv, changed: str) -> None:
    peer.ensure()
    getattr(peer, changed).write_text("torch==3\n")
    assert not peer.is_ready()
    peer.ensure()
    assert peer.is_ready()
    assert len(commands.seen) == 6


def test_a_line_that_moves_between_the_files_changes_the_stamp(peer: PeerVenv) -> None:
    assert peer.torch is not None
    both = peer.torch.read_text() + peer.requirement.read_text()
    before = peer.digest()
    peer.torch.write_text(both)
    peer.requirement.write_text("")
    assert peer.digest() != before


def test_a_missing_interpreter_is_noticed(commands: FakeCommands, peer: PeerVenv) -> None:
    peer.ensure().unlink()
    assert not peer.is_ready()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_failed_step_leaves_no_stamp(commands: FakeCommands, peer: PeerVenv, step: int) -> None:
    commands.fails = lambda command: len(commands.seen) == step + 1
    with pytest.raises(UnsupportedError, match=r"some-peer.*exited with status 7(?s:.*)what pip said"):
        peer.ensure()
    assert len(commands.seen) == step + 1
    assert not peer.is_ready()

    commands.fails = lambda command: False
    peer.ensure()
    assert peer.is_ready()


def test_a_failed_remake_does_not_keep_the_old_stamp(commands: FakeCommands, peer: PeerVenv) -> None:
    peer.ensure()
    old = peer.requirement.read_text()
    peer.requirement.write_text("other==4\n")
    commands.fails = lambda command: str(peer.requirement) in command
    with pytest.raises(UnsupportedError):
        peer.ensure()
    peer.requirement.write_text(old)
    assert not peer.is_ready()


def test_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert tail(log, 2).splitlines()[0] == "two"
