"""Which nodes the fleet has: those of a file that is read again when it changes, or those that DNS has."""

from __future__ import annotations

from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import dns, settings
from shapeshift.fleet.node import Members, Membership
from shapeshift.registry import FolderWatch

# In the folder of a fleet on Ray: a fleet file with membership `static`, which `fleet up` writes.
NODES_FILE = "nodes.toml"


class FileMembership:
    """The nodes of the fleet file `path`, as the node `node` reads it. None, with a problem, until one is valid.

    A file that is invalid later changes nothing: the last nodes stay, and the problem is reported.
    """

    def __init__(self, path: Path, node: str = "") -> None:
        self._path = path
        self._node = node
        self._watch = FolderWatch(path)
        self._members = Members()

    def members(self) -> Members:
        """The nodes of the file's last valid content."""
        if self._watch.has_changed():
            try:
                self._members = Members(settings.read(self._path, self._node).nodes)
            except ShapeshiftError as error:
                self._members = Members(self._members.nodes, str(error))
        return self._members

    def close(self) -> None:
        """Nothing is held."""


def open_membership(path: Path, node: str = "") -> Membership:
    """The membership of the fleet file `path`, as the node `node` (empty: none) reads it; to be closed.

    Raises as `settings.read` does, and ShapeshiftError for an invalid section [dns] or [ray].
    """
    fleet = settings.read(path, node)
    try:
        if fleet.membership == "dns":
            return dns.DnsMembership(dns.read(fleet.source.get("dns", {})), fleet.tls, path.parent)
        if fleet.membership == "ray":
            return FileMembership(path.parent / settings.ray_settings(fleet).folder / NODES_FILE, node)
    except ShapeshiftError as error:
        raise ShapeshiftError(f"{path}: {error}") from None
    return FileMembership(path, node)
