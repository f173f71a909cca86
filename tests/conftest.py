"""Fixtures that several folders of tests share."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """A function that names so many ports of 127.0.0.1 that nothing uses, each only once."""
    # Below the kernel's own range, so that no outgoing connection takes one meanwhile.
    candidates = random.sample(range(18_000, 32_000), 14_000)

    def pick(count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            port = candidates.pop()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    found.append(port)
        return found

    return pick
