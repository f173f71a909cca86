"""Messages between rank 0 and another rank, over a socket that the child inherits: 8 bytes of length, then the content.

Imports no torch at first, so that a child can watch for the end of its parent before it loads anything.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


class Connection:
    """One end of the socket. The end of the other process closes it, however that process ends."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, content: bytes, timeout_s: float | None = None) -> None:
        """Raises OSError where the other end is closed, or does not take it within `timeout_s`."""
        self._end.settimeout(timeout_s)
        self._end.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises EOFError where the other end is closed, TimeoutError after `timeout_s` in vain."""
        self._end.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        self._end.close()

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            try:
                piece = self._end.recv(min(count - len(content), 1 << 20))
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError("the other process has closed its end")
            content += piece
        return bytes(content)
