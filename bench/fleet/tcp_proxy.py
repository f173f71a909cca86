"""A TCP proxy that delays, holds and resets connections, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_CHUNK = 65536


class TcpProxy:
    """Passes connections to 127.0.0.1:PORT on to `target`, HOST:PORT.

    delay_s: added in each direction; cut: while True nothing passes, as with a cable that is out, and what was sent
    arrives afterwards.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.cut = False
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self.address = ""

    def reset(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._reset)

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._reset()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, there_writer}
        # Cancelled at the end; asyncio would write a traceback for each connection.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
        self._open -= {writer, there_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one direction on, in order, each chunk `delay_s` after it came."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, chunk = await chunks.get()
                await asyncio.sleep(due - self._loop.time())
                while self.cut:
                    await asyncio.sleep(0.01)
                writer.write(chunk)
                await writer.drain()

        sending = asyncio.ensure_future(send())
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                chunks.put_nowait((self._loop.time() + self.delay_s, chunk))
        sending.cancel()
        writer.close()

    def _reset(self) -> None:
        for writer in self._open:
            # Closing with this option sends RST.
            opened: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
