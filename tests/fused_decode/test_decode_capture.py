"""The order in which a graph is captured, by a stand-in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.model.graphs import step
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds


class Stream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def wait_stream(self, other: Stream) -> None:
        self._said.append(f"{self.name} waits for {other.name}")


def test_a_graph_is_captured_after_warm_up_runs_beside_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries allocate and choose kernels in a first run, which no graph may hold."""
    said: list[str] = []
    current = Stream("current", said)

    @contextmanager
    def within(name: str) -> Iterator[None]:
        said.append(f"begin {name}")
        yield
        said.append(f"end {name}")

    def graph(own: Any, *, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
        return within(f"capture in {pool} on {stream.name}, {capture_error_mode}")

    cuda = SimpleNamespace(
        Stream=lambda device: Stream("side", said),
        current_stream=lambda device: current,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        stream=lambda stream: within(f"runs on {stream.name}"),
        graph=graph,
    )
    monkeypatch.setattr(step, "torch", SimpleNamespace(cuda=cuda))
    replay = step._capture(lambda: said.append("compute"), torch.device("cuda:0"), "pool", GraphBounds(1, 64))
    runs = said.index("end runs on side") - said.index("begin runs on side") - 1
    assert runs >= 1
    assert said == [
        *("side waits for current", "begin runs on side", *["compute"] * runs, "end runs on side"),
        *("current waits for side", "begin capture in pool on side, thread_local", "compute"),
        "end capture in pool on side, thread_local",
    ]
    replay()
    assert said[-1] == "replay"
