"""Membership by a fleet file, which is read again when it changes."""

from __future__ import annotations

from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.membership.interface import Members
from shapeshift.registry import FolderWatch


class StaticMembership:
    """The nodes of the fleet file `path`, as the node `node` reads it. Raises as `settings.read` does, at first only.

    A file that is invalid later changes nothing: the last nodes stay, and the problem is reported.
    """

    def __init__(self, path: Path, node: str = "") -> None:
        self._path = path
        self._node = node
        self._watch = FolderWatch(path)
        self._watch.has_changed()
        self._members = Members(settings.read(path, node).nodes)

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
