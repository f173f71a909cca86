"""The gRPC client of a front, connected to fronts in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shapeshift.errors import OverloadedError
from shapeshift.serving.error_codes import FORWARDED, code_of, error_of
from shapeshift.triton.async_client import AsyncClient, ModelCall, Tensors
from tests.fakes import PbUtils, Request, values_of


class FakeClient(AsyncClient):
    """Calls `pb_utils.models` by name. `calls` are those that were made; a model in `dead` never answers.

    answer: in place of the models.
    """

    def __init__(self, pb_utils: PbUtils) -> None:
        super().__init__("nowhere")
        self.calls: list[ModelCall] = []
        self.dead: dict[str, str] = {}
        self.answer: Callable[[ModelCall], Awaitable[Tensors]] | None = None
        self._pb_utils = pb_utils

    async def first(self, call: ModelCall) -> Tensors:
        self.calls.append(call)
        if self.answer is not None:
            return await self.answer(call)
        if call.model not in self._pb_utils.models:
            raise error_of(f"Model '{call.model}' is not ready.")
        request = Request(
            call.outputs, {**call.parameters, FORWARDED: True}, call.request_id, decoupled=True, **call.inputs
        )
        if call.model in self.dead:
            if "stop_id" in call.inputs:
                raise error_of(self.dead[call.model])
        else:
            await asyncio.to_thread(self._pb_utils.models[call.model].execute, [request])
        try:
            return self._answer(await asyncio.wait_for(_responses(request), call.timeout_s))
        except TimeoutError:
            raise OverloadedError(f"model {call.model} gave no answer within {call.timeout_s:g} s") from None
        except asyncio.CancelledError:
            request.sender.cancelled = True
            raise

    def _answer(self, response: Any) -> Tensors:
        if response.has_error():
            raise error_of(response.error().message(), code_of(self._pb_utils, response.error().code()))
        return values_of(response)


async def _responses(request: Request) -> Any:
    while not request.sender.responses:
        await asyncio.sleep(0.002)
    assert not request.sender.breaches, request.sender.breaches
    return request.sender.responses[0]
