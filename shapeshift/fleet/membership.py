"""Which nodes the fleet has: those of a file that is read again when it changes, or those that DNS has."""

from __future__ import annotations

from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import dns, settings
from shapeshift.fleet.node import Members, Membership
from shapeshift.fleet.settings import DnsSettings, RaySettings
from shapeshift.registry import FolderWatch

# In the folder of a fleet on Ray: a fleet file with [[nodes]], which `fleet up` writes.
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

    Raises as `settings.read` does.
    """
    fleet = settings.read(path, node)
    if isinstance(fleet.source, DnsSettings):
        return dns.DnsMembership(fleet.source, fleet.tls, path.parent)
    if isinstance(fleet.source, RaySettings):
        return FileMembership(path.parent / fleet.source.folder / NODES_FILE, node)
    return FileMembership(path, node)
