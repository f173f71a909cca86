"""When a backend may begin to ask its server for things."""

from __future__ import annotations

import sys
import threading

_LOOK_S = 0.05
_GRACE_S = 0.5


def wait_initialized(stopping: threading.Event) -> None:
    """Wait until the backend's `initialize` has returned and the server has had time to hear of it.

    A question about other models, asked before, ends the whole server (Triton 24.10: lock_exception). Triton
    says nothing to a backend between `initialize` and the first request, so the main thread's calls are
    looked at.
    """
    while _initializing() and not stopping.wait(_LOOK_S):
        pass
    stopping.wait(_GRACE_S)


def _initializing() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "initialize":
            return True
        frame = frame.f_back
    return False
