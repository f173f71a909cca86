"""A test that kills a process is skipped where Triton ends over it, and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.triton_aborts import pytest_runtest_call


class Server:
    """Counts its starts."""

    def __init__(self, folder: Path, log: str) -> None:
        self.settings = SimpleNamespace(log=folder / "server.log")
        self.settings.log.write_text(log)
        self.starts = 0

    def stop(self) -> None:
        pass

    def start(self) -> Server:
        self.starts += 1
        return self

    def wait_ready(self) -> None:
        pass


def fail(server: Server, mark: str = "kills") -> None:
    """What becomes of a test with this mark that fails beside the server."""
    item: Any = SimpleNamespace(
        funcargs={"server": server}, get_closest_marker=lambda name: mark if name == mark else None
    )
    call = pytest_runtest_call(item)
    next(call)
    call.throw(AssertionError("it fails"))  # type: ignore[attr-defined]


ABORT = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"


def test_an_abort_of_triton_is_no_failure(tmp_path: Path) -> None:
    server = Server(tmp_path, f"line\n{ABORT}\n")
    with pytest.raises(pytest.skip.Exception, match="Triton aborted"):
        fail(server)
    assert server.starts == 1


@pytest.mark.parametrize(("log", "mark"), [("another end", "kills"), (ABORT, "slow")])
def test_every_other_failure_stays_one(tmp_path: Path, log: str, mark: str) -> None:
    server = Server(tmp_path, log)
    with pytest.raises(AssertionError, match="it fails"):
        fail(server, mark)
    assert server.starts == 0
