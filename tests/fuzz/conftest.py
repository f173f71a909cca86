"""The gateway of `tests.gateway`, for its fuzz."""

from __future__ import annotations

from tests.gateway.conftest import start_gateway, triton, url

__all__ = ["start_gateway", "triton", "url"]
