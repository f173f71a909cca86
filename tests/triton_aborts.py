"""Tests that kill a model's process may end the server: Triton 24.10 aborts over a lock that the process held.

See "What Triton 24.10 does not survive" in docs/drill.md. A test with the mark `kills` is skipped then, and its server
is started again for the tests behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

_ABORT = "boost::interprocess::lock_exception"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a failed test with the mark whose server, the fixture `server`, was ended by that abort."""
    try:
        return (yield)
    except Exception:
        server: TritonServer | None = getattr(item, "funcargs", {}).get("server")
        if item.get_closest_marker("kills") is None or server is None or not _has_aborted(server):
            raise
        server.stop()
        server.start().wait_ready()
    pytest.skip("Triton aborted over a lock that the killed process held; its server was started again")


def _has_aborted(server: TritonServer) -> bool:
    return _ABORT in server.settings.log.read_text(errors="replace")
