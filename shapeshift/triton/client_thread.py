"""An event loop with a thread of its own, for callers of the asynchronous client that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol


class Client(Protocol):
    """A client, or several."""

    async def close(self) -> None:
        """Close the connections."""


class ClientThread:
    """Runs the tasks that call `client`. `start` may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc-client", daemon=True)
        self._thread.start()

    def start(self, task: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `task` on the event loop. Cancel the returned future to cancel it."""
        return asyncio.run_coroutine_threadsafe(task, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks, close the client and end the thread; nothing happens where it has ended."""
        if not self._thread.is_alive():
            return
        self.start(self._shut_down())
        self._thread.join(timeout_s)

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()
        self._loop.stop()
