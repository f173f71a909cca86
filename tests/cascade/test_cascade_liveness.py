"""Threads of a cascade that hang: those of the candidate that serves now."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from shapeshift.engines.providers.emulated import EmulatedEngine
from tests.cascade.conftest import ALL, FakeLevel, candidate, gap
from tests.fakes import text_request
from tests.stalls import only_stalled, watched, without_patience
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.cascade.conftest import Workspace


def test_an_engine_thread_before_and_after_a_swap(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    without_patience(monkeypatch)
    opened = threading.Event()
    opened.set()
    compute = EmulatedEngine.run

    def wait(*arguments: Any) -> Any:
        assert opened.wait(120)
        return compute(*arguments)

    monkeypatch.setattr(EmulatedEngine, "run", wait)
    workspace.pb_utils.models["large"] = FakeLevel((0.0, 4.0))
    first, second = (candidate(name, ("small", "large"), [gap(c=0.0)]) for name in ("first", "second"))
    front = workspace.open(workspace.table(first, second))
    for name in ("first", "second"):
        workspace.put(workspace.table(first, second), name)
        said = f"candidate {name}"
        wait_for(lambda said=said: any(said in line for line in workspace.pb_utils.Logger.lines))  # type: ignore[misc]
        request = text_request("a text", outputs=ALL)
        with only_stalled(workspace.pb_utils, "engine-0", opened.set):
            opened.clear()
            front.execute([request])
        request.vectors("LABEL")
    assert watched(workspace.pb_utils) == {"execute", "responses", "errors", "engine-0"}
