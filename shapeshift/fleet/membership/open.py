"""Opens the membership that a fleet file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.membership import dns, written
from shapeshift.fleet.membership.interface import Membership
from shapeshift.fleet.membership.static import StaticMembership
from shapeshift.fleet.settings import FleetSettings


def open_membership(path: Path, node: str = "") -> Membership:
    """The membership of the fleet file `path`, as the node `node` (empty: none) reads it; to be closed.

    Raises as `settings.read` does, and ShapeshiftError for an invalid section [dns] or [ray].
    """
    found = settings.read(path, node)
    try:
        return _OPENERS[found.membership](found, path, node)
    except ShapeshiftError as error:
        raise ShapeshiftError(f"{path}: {error}") from None


def _dns(found: FleetSettings, path: Path, node: str) -> Membership:
    return dns.DnsMembership(dns.read(found.source.get("dns", {})), found.tls, path.parent)


def _ray(found: FleetSettings, path: Path, node: str) -> Membership:
    return written.WrittenMembership(path.parent / written.read(found.source.get("ray", {})).nodes_file, node)


def _static(found: FleetSettings, path: Path, node: str) -> Membership:
    return StaticMembership(path, node)


_OPENERS: dict[str, Callable[[FleetSettings, Path, str], Membership]] = {
    "static": _static,
    "dns": _dns,
    "ray": _ray,
}
