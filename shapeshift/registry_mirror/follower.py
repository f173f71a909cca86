"""Follows a registry at a URL: threads beside those that serve keep its local copy up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.loops import Loop
from shapeshift.registry import Follower, Layout
from shapeshift.registry_mirror.mirror import Mirror
from shapeshift.serving.metrics import Counter

Log = Callable[[str], None]
Update = Callable[[Callable[[], bool]], Mapping[str, str]]
"""See `mirror.Mirror.update`."""

_LIMIT_S = 20.0


class RegistryFollower(Follower):
    """Updates the copy `period_s` seconds after it was updated last, until `close`.

    An update runs on a thread of its own. It has failed while it has not ended after `limit_s` seconds; no second one
    is started meanwhile. The first one is waited for as long. Each failure is counted, and logged once.
    """

    def __init__(self, update: Update, url: str, period_s: float, log: Log, limit_s: float = _LIMIT_S) -> None:
        self._update = update
        self._url = url
        self._period_s = period_s
        self._limit_s = limit_s
        self._log = log
        self._failures = Counter("registry_fetch_failures_total", "Looks at a registry's URL, or entries, that failed")
        self.metrics = [self._failures]
        self._running: Future[Mapping[str, str]] | None = None
        self._reported: set[str] = set()
        self._looked = threading.Event()
        self._loop = Loop("registry_url", self._look, log)
        self._loop.start()
        self._looked.wait(limit_s)

    def close(self) -> None:
        """Change nothing from now on. The threads may be waiting for the URL: they are not waited for."""
        self._loop.stop(0.0)

    def _look(self) -> float:
        self._running = self._running or self._start()
        try:
            problems = self._running.result(self._limit_s)
            self._running = None
        except TimeoutError:
            problems = {"": f"{self._url} has not been read after {self._limit_s:g} s"}
        if not self._loop.stopped.is_set():
            self._report(problems)
        self._looked.set()
        return self._period_s

    def _start(self) -> Future[Mapping[str, str]]:
        """One update: what went wrong, by what is logged once. Threads of a pool would hold up the end of a process."""
        outcome: Future[Mapping[str, str]] = Future()

        def run() -> None:
            try:
                problems = self._update(lambda: not self._loop.stopped.is_set())
            except ShapeshiftError as error:
                problems = {"": str(error)}
            except Exception as error:  # noqa: BLE001  reported; the next one is tried
                problems = {"": f"{type(error).__name__}: {error}"}
            outcome.set_result(problems)

        threading.Thread(target=run, name="registry_fetch", daemon=True).start()
        return outcome

    def _report(self, problems: Mapping[str, str]) -> None:
        for key, text in problems.items():
            self._failures.add()
            if key not in self._reported:
                self._log(f"the copy of the registry is left as it is: {text}")
        self._reported = set(problems)


def open_url(url: str, period_s: float, folder: Path, layout: Layout, log: Log) -> RegistryFollower:
    """Follow `url` with a copy in `folder`.

    Raises InvalidInputError for an invalid URL, UnsupportedError without its packages.
    """
    return RegistryFollower(Mirror("registry_url", url, layout, folder).update, url, period_s, log)
