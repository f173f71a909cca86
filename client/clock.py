"""Waits for an instant in an asyncio program, more precise than the event loop's timers.

The loop rounds waits up to whole milliseconds, which is too coarse to time answers of milliseconds. On Linux a timer
file descriptor wakes the program within about 0.1 ms; on other systems the loop's timer is used.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from types import TracebackType

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_SPEC = struct.Struct("@qqqq")


class Alarm:
    """Wakes one coroutine at instants of `time.monotonic()`. A context manager, to be used in a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        self._libc: ctypes.CDLL | None = None
        self._descriptor = -1

    def __enter__(self) -> Alarm:
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
            if self._descriptor >= 0:
                self._libc = libc
                self._loop.add_reader(self._descriptor, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    async def wait_until(self, instant: float) -> None:
        """Return at `instant` or soon after. Other tasks run at least once, even if `instant` is past."""
        if instant <= time.monotonic():
            await asyncio.sleep(0)
        elif self._libc is None:
            await asyncio.sleep(instant - time.monotonic())
        else:
            self._woken = self._loop.create_future()
            nanoseconds = int(instant * 1e9)
            spec = _SPEC.pack(0, 0, *divmod(nanoseconds, 1_000_000_000))
            if self._libc.timerfd_settime(self._descriptor, _ABSOLUTE, spec, None) != 0:
                raise OSError(ctypes.get_errno(), "timerfd_settime failed")
            await self._woken

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
