"""Threads of a front that hang: what the front exports about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shapeshift.serving import liveness
from tests.fakes import PbUtils
from tests.waiting import wait_for

METRIC = "shapeshift_thread_stalled_seconds"


def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a thread with short steps is stalled at the first check that finds no step."""
    monkeypatch.setattr(liveness, "_MIN_LIMIT_S", 0.0)


def stalled(pb_utils: PbUtils) -> set[str]:
    """The threads that the last flush exported as stalled."""
    return {
        dict(labels)["thread"] for (name, labels), value in list(pb_utils.metrics.items()) if name == METRIC and value
    }


def watched(pb_utils: PbUtils) -> set[str]:
    """The threads that are watched."""
    return {dict(labels)["thread"] for name, labels in list(pb_utils.metrics) if name == METRIC}


@contextmanager
def only_stalled(pb_utils: PbUtils, thread: str, release: Any) -> Iterator[None]:
    """After the block, in which `thread` is made to hang, it alone is stalled; after `release()` none is."""
    try:
        yield
        wait_for(lambda: stalled(pb_utils) == {thread})
    finally:
        release()
    wait_for(lambda: not stalled(pb_utils))
