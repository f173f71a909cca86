"""The sidecar's log: one line for each decision, and a report of the last decisions."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_KEPT_DECISIONS = 50

Publish = Callable[[dict[str, Any]], None]


class Journal:
    """Logs decisions. Thread-safe.

    log: gets each line; publish: takes the whole report after each change of it; status: what the report
    says about the sidecar itself.
    """

    def __init__(self, log: logging.Logger, publish: Publish, status: Mapping[str, Any]) -> None:
        self._log = log
        self._publish = publish
        self._status = dict(status)
        self._plans: dict[str, dict[str, Any]] = {}
        self._decisions: collections.deque[dict[str, str]] = collections.deque(maxlen=_KEPT_DECISIONS)
        self._last: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def log(self, kind: str, subject: str, text: str, level: int = logging.INFO) -> None:
        """Log an event, each time that it happens."""
        with self._lock:
            self._append(kind, subject, text, level)

    def log_once(self, kind: str, subject: str, text: str, level: int = logging.INFO) -> None:
        """Log a state. It is not logged again while `text` stays the same for this kind and subject."""
        with self._lock:
            if self._last.get((kind, subject)) != text:
                self._last[kind, subject] = text
                self._append(kind, subject, text, level)

    def clear(self, kind: str, subject: str) -> bool:
        """Forget the state that `log_once` logged last; whether there was one."""
        with self._lock:
            return self._last.pop((kind, subject), None) is not None

    def record_plan(self, front: str, values: Mapping[str, Any]) -> None:
        """Replace the front's plan in the report."""
        with self._lock:
            self._plans[front] = {"at": _now(), **values}
            self._publish_report()

    def update_status(self, **values: Any) -> None:
        """Change what the report says about the sidecar itself."""
        with self._lock:
            if any(self._status.get(name) != value for name, value in values.items()):
                self._status |= values
                self._publish_report()

    def _append(self, kind: str, subject: str, text: str, level: int) -> None:
        fields = {"kind": kind, "subject": subject}
        self._decisions.append({"at": _now(), **fields, "text": text})
        self._log.log(level, f"{kind} {subject}: {text}", extra={"fields": fields})
        self._publish_report()

    def _publish_report(self) -> None:
        self._publish({**self._status, "plans": self._plans, "decisions": list(self._decisions)})


def _now() -> str:
    """The wall-clock time, for readers only; no decision uses it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
