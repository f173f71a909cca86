"""Renders chat templates in processes of their own, which can be ended.

A template comes with a checkpoint, and what it does depends on the text of users: one filter of Jinja may compute for
many seconds without giving way to other threads. So it never runs in the process that serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.serving.chat_templates import conversation

MAX_SECONDS = 10.0
"""For one rendering; ordinary ones take milliseconds."""
_MEMORY_BYTES = 1 << 30
# One template that takes its whole time holds up no other conversation.
_PROCESSES = 2
_PR_SET_PDEATHSIG = 1


class TemplateSource(NamedTuple):
    """A template's Jinja source, and the special tokens that it may use, by name."""

    text: str
    special_tokens: Mapping[str, str]


class ChatRenderer:
    """Two processes that render. They start with the first call of `start` or `render`, and again after an end."""

    def __init__(self) -> None:
        self._pool = _new_pool()

    def start(self) -> None:
        """Start the processes, so that the first conversation does not wait for them."""
        for _ in range(_PROCESSES):
            self._pool.schedule(conversation.render, args=("", (), [], None))

    async def render(
        self, template: TemplateSource, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """The text of a conversation, see `conversation.ChatTemplate.render`.

        Raises InvalidInputError for what the template refuses, and beyond the limits of time, memory and length;
        EngineError where no process can be started.
        """
        tokens = tuple(sorted(template.special_tokens.items()))
        try:
            for _ in range(2):
                with contextlib.suppress(BrokenProcessPool):
                    return await self._rendered(template.text, tokens, messages, tools)
            raise EngineError("chat template: its process ends at once; is there memory left?")
        except conversation.TemplateError as error:
            allowed = f"what the model's chat template takes: {error}"
        except TimeoutError:
            allowed = f"what the model's chat template renders within {MAX_SECONDS:g} s"
        except ProcessExpired:
            allowed = f"what the model's chat template renders within {_MEMORY_BYTES >> 20} MiB"
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise InvalidInputError("messages", roles, allowed)

    async def _rendered(self, *args: Any) -> str:
        # A process that ends while it has nothing to do ends the pool.
        if not self._pool.active:
            self.close()
            self._pool = _new_pool()
        return str(await asyncio.wrap_future(self._pool.schedule(conversation.render, args=args, timeout=MAX_SECONDS)))

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()


def _new_pool() -> ProcessPool:
    # Not by fork: this process has threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(_PROCESSES, initializer=_begin, initargs=(os.getpid(),), context=context)


def _begin(parent: int) -> None:
    """In a new process: its bounds. It ends with the process that started it, also in the middle of a rendering."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
