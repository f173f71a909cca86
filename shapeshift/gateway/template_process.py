"""A process that renders chat templates: the gateway's end of it, and what runs in it.

A line of JSON goes there, the arguments of `ChatTemplate.options_of` and `render`, and a line of JSON comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shapeshift.serving.chat_templates.conversation import ChatTemplate, Message, TemplateError, UnreadOptionError

MEMORY_BYTES = 1 << 30
_PIECE_BYTES = 1 << 18
_START_S = 60.0
_PR_SET_PDEATHSIG = 1


class TemplateProcess:
    """A process that renders one conversation at a time. It starts with `start` or the first one, also after an end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False

    def start(self) -> socket.socket:
        """The channel to the process, which is started unless it runs. Raises OSError."""
        if self._channel is None:
            channel, other = socket.socketpair()
            channel.setblocking(False)
            command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            with other:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=other.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            self._channel = channel
        return self._channel

    async def render(self, arguments: Sequence[Any], max_seconds: float) -> str:
        """The text, see `ChatTemplate.render`. arguments: those of `_rendered`, as JSON has them.

        Raises TemplateError; TimeoutError after `max_seconds`, ConnectionError where the process ends before; OSError.
        """
        try:
            question = orjson.dumps(arguments) + b"\n"
        except TypeError as error:
            # Nested too deep.
            raise TemplateError(str(error)) from None
        channel = self.start()
        try:
            if not self._is_ready:
                async with asyncio.timeout(_START_S):
                    await _line(channel)
                self._is_ready = True
            async with asyncio.timeout(max_seconds):
                await asyncio.get_running_loop().sock_sendall(channel, question)
                answer = orjson.loads(await _line(channel))
        except BaseException:
            # Also where the client has left: what it renders is for nobody.
            self.end()
            with contextlib.suppress(OSError):
                self.start()
            raise
        if "unread" in answer:
            raise UnreadOptionError(*answer["unread"])
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def end(self) -> None:
        """End it, also in the middle of a conversation."""
        if self._channel is not None and self._process is not None:
            # Before its channel closes, over which it would write a traceback.
            self._process.kill()
            self._process.wait()
            self._channel.close()
        self._channel, self._is_ready = None, False


async def _line(channel: socket.socket) -> bytes:
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        piece = await asyncio.get_running_loop().sock_recv(channel, _PIECE_BYTES)
        if not piece:
            raise ConnectionResetError
        pieces.append(piece)
    return b"".join(pieces)


def main() -> None:
    """Render what comes by standard input, a socket. It ends with its parent, also in the middle of a rendering."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as channel, channel.makefile("rb", _PIECE_BYTES) as lines:
        channel.sendall(b"\n")
        for line in lines:
            channel.sendall(_answer(line) + b"\n")


def _answer(line: bytes) -> bytes:
    try:
        return orjson.dumps({"text": _rendered(*orjson.loads(line))})
    except UnreadOptionError as error:
        return orjson.dumps({"unread": error.args})
    except TemplateError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  a template may raise whatever Python does
        reason = f"{type(error).__name__}: {error}"
    return orjson.dumps({"error": reason.encode(errors="replace").decode()})


def _rendered(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    reasoning_effort: str | None,
    thinks: bool,
    add_generation_prompt: bool,
    continues: bool,
) -> str:
    template = _template(source, tuple(special_tokens.items()))
    is_given = options or reasoning_effort or thinks
    chosen = template.options_of(options, reasoning_effort, thinks) if is_given else {}
    return template.render(messages, tools, add_generation_prompt, chosen, continues)


@functools.lru_cache(maxsize=32)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


if __name__ == "__main__":
    main()
