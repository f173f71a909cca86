"""What the sidecar says: one line a decision, said once while it stays the same, and the report of the last ones."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_KEPT = 50

Write = Callable[[str], None]
Publish = Callable[[dict[str, Any]], None]


class Journal:
    """Threads may share it. `write` takes a line, `publish` the whole report, at every change of it."""

    def __init__(self, write: Write, publish: Publish, about: Mapping[str, Any]) -> None:
        self._write = write
        self._publish = publish
        self._about = dict(about)
        self._plans: dict[str, dict[str, Any]] = {}
        self._decisions: collections.deque[dict[str, str]] = collections.deque(maxlen=_KEPT)
        self._said: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def say(self, kind: str, subject: str, text: str) -> None:
        """Log a decision or a finding about `subject`, unless it is what was said last of this kind about it."""
        with self._lock:
            if self._said.get((kind, subject)) != text:
                self._said[kind, subject] = text
                self._tell(kind, subject, text)

    def event(self, kind: str, subject: str, text: str) -> None:
        """Log what has happened, each time that it happens."""
        with self._lock:
            self._tell(kind, subject, text)

    def forget(self, kind: str, subject: str) -> bool:
        """What was said of this kind holds no longer; whether there was anything."""
        with self._lock:
            return self._said.pop((kind, subject), None) is not None

    def plan(self, front: str, values: Mapping[str, Any]) -> None:
        """Keep the front's last plan and its reason in the report."""
        with self._lock:
            self._plans[front] = {"at": _now(), **values}
            self._update()

    def about(self, **values: Any) -> None:
        """Change what the report says about the sidecar itself."""
        with self._lock:
            if any(self._about.get(name) != value for name, value in values.items()):
                self._about |= values
                self._update()

    def _tell(self, kind: str, subject: str, text: str) -> None:
        now = _now()
        self._decisions.append({"at": now, "kind": kind, "subject": subject, "text": text})
        self._write(f"{now} {kind} {subject}: {text}\n")
        self._update()

    def _update(self) -> None:
        self._publish({**self._about, "plans": self._plans, "decisions": list(self._decisions)})


def _now() -> str:
    """The time of day for readers; nothing is decided by it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
