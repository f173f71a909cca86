"""Which nodes are gone: those that did not answer twice in a row.

Only questions are counted, never seconds, so a sidecar that is delayed takes no node for gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping

from shapeshift.sidecar.journal import Journal

# Unanswered questions in a row until a node is gone, and answered ones until it is back.
GONE, BACK = 2, 2


class Presence:
    """Thread-safe. Several sources ask each node (`metrics`, `models`); a node is present if it answers all of them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        # By node and source: answers in a row, negative for missing ones.
        self._streaks: dict[str, dict[str, int]] = {}
        self._gone: frozenset[str] = frozenset()

    @property
    def gone(self) -> frozenset[str]:
        """The nodes that are gone now; nodes that are no longer members are not among them."""
        return self._gone

    def record(self, source: str, answered: Collection[str], problems: Mapping[str, str]) -> None:
        """Take one more question to all members into account: those that answered, and why the others did not."""
        with self._lock:
            members = {*answered, *problems}
            self._streaks = {node: self._streaks.get(node, {}) for node in members}
            for node, streaks in self._streaks.items():
                before = streaks.get(source, 0)
                streaks[source] = max(before, 0) + 1 if node in answered else min(before, 0) - 1
            gone = frozenset(node for node in members if self._is_gone(node))
            left, returned = gone - self._gone, (self._gone & members) - gone
            self._gone = gone
        for node in left:
            text = f"does not answer, and is planned around: {problems.get(node, source)}"
            self._journal.log("node", node, text, logging.WARNING)
        for node in returned:
            self._journal.log("node", node, "answers again")

    def _is_gone(self, node: str) -> bool:
        streaks = self._streaks[node].values()
        if node in self._gone:
            return any(streak < BACK for streak in streaks)
        return any(streak <= -GONE for streak in streaks)
