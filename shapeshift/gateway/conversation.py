"""A conversation, whichever API it came by, and the prompt that a model's chat template makes of it.

A template comes with a checkpoint, and what it does depends on the text of users: one filter of Jinja may compute for
many seconds without giving way to other threads. So it runs in processes of its own, which can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import ApiError
from shapeshift.serving.chat_templates.conversation import TemplateError, begin, render

_MEMORY_BYTES = 1 << 30
# One template that takes its whole time holds up no other conversation.
_PROCESSES = 2
_PATIENCE = 6
"""Times `max_seconds` until the processes count as stuck; a conversation may wait for others."""


@dataclass(frozen=True)
class Conversation:
    """What an API makes of its request.

    messages  as chat templates know them, in the form of OpenAI's chat API: role, content, tool_calls and the like
    tools     those that the template is to show, as the request has them; None without any
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


class ChatRenderer:
    """Two processes that render. They start with the first call of `start` or `prompt`, and again after an end.

    max_seconds: for one rendering; ordinary ones take milliseconds.
    """

    def __init__(self, max_seconds: float = 10.0) -> None:
        self._max_seconds = max_seconds
        self._pool = _new_pool()

    def start(self) -> None:
        """Start the processes, so that the first conversation does not wait for them."""
        for _ in range(_PROCESSES):
            self._pool.schedule(render, args=("", (), [], None))

    async def prompt(self, target: Target, chat: Conversation) -> str:
        """The text of a conversation by the model's template, see `ChatTemplate.render`.

        Raises ApiError for a model without one, InvalidInputError for what the template refuses, and beyond the limits
        of time, memory and length; EngineError where no process can be started.
        """
        description = target.front.description
        source = (description.get("tool_use_template") if chat.tools else None) or description.get("chat_template")
        if not source:
            reason = (
                f"model: the checkpoint of {target.name} has no chat template: use /v1/completions, or put a"
                " chat_template.jinja into the folder of the checkpoint and build the model again"
            )
            raise ApiError(400, reason, param="model", code="model_not_supported")
        tokens = tuple(sorted((description.get("special_tokens") or {}).items()))
        try:
            for _ in range(2):
                with contextlib.suppress(BrokenProcessPool):
                    return await self._rendered(str(source), tokens, chat.messages, chat.tools)
            raise EngineError("chat template: its process ends at once; is there memory left?")
        except TemplateError as error:
            allowed = f"what the model's chat template takes: {error}"
        except TimeoutError:
            allowed = f"what the model's chat template renders within {self._max_seconds:g} s"
        except ProcessExpired:
            allowed = f"what the model's chat template renders within {_MEMORY_BYTES >> 20} MiB"
        roles = ", ".join(str(message.get("role")) for message in chat.messages)
        raise InvalidInputError("messages", roles, allowed)

    async def _rendered(self, *args: Any) -> str:
        # A process that ends while it has nothing to do ends the pool.
        if not self._pool.active:
            self.close()
            self._pool = _new_pool()
        pool = self._pool
        future: Any = pool.schedule(render, args=args, timeout=self._max_seconds)
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([waiting], timeout=_PATIENCE * self._max_seconds)
        finally:
            # Also where the client has left.
            waiting.cancel()
        if not done:
            # A process that was killed, or stopped, while it held the pool's channel: no other gets a conversation.
            if self._pool is pool:
                self._pool = _new_pool()
            threading.Thread(target=pool.stop, daemon=True).start()
            raise BrokenProcessPool
        return str(done.pop().result())

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()


def _new_pool() -> ProcessPool:
    # Not by fork: this process has threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(_PROCESSES, initializer=begin, initargs=(os.getpid(), _MEMORY_BYTES), context=context)
