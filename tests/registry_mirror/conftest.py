"""Registries at URLs."""

from __future__ import annotations

from tests.registry_mirror.remote_registry import remote as remote
