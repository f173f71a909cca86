"""What the asynchronous client refuses to send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.triton.async_client import AsyncClient, ModelCall


@pytest.mark.parametrize("value", [10**25, -(2**63) - 1, None, [1]])
@pytest.mark.parametrize("method", ["infer", "first"])
def test_a_parameter_that_cannot_be_sent_is_named(method: str, value: Any) -> None:
    async def ask() -> None:
        client = AsyncClient("127.0.0.1:9")
        try:
            await getattr(client, method)(ModelCall("m", {}, 1.0, parameters={"level": value}))
        finally:
            await client.close()

    with pytest.raises(InvalidInputError, match="parameter level: got "):
        asyncio.run(ask())
