"""Registries at URLs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.registry_mirror.remote_registry import HeldBack, RemoteRegistry


@pytest.fixture
def remote() -> Iterator[RemoteRegistry]:
    yield RemoteRegistry()
    HeldBack.before = staticmethod(lambda path: None)
