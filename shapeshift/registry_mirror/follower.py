"""Follows a registry at a URL: threads beside those that serve keep its local copy up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.errors import ShapeshiftError
from shapeshift.registry import Layout
from shapeshift.serving.metrics import Counter, Metric
from shapeshift.serving.model_args import Log
from shapeshift.settings import Choices, require

Update = Callable[[Callable[[], bool]], Mapping[str, str]]
"""See `mirror.Mirror.update`."""

_LIMIT_S = 20.0
# A server without a URL imports none of it.
_MIRRORS: Choices[Callable[[str, str, Layout, Path], Any]] = Choices(
    "registry_url", {"fsspec": "shapeshift.registry_mirror.mirror:Mirror"}
)


@dataclass(frozen=True)
class RegistrySettings:
    """Parameters of a registry at a URL.

    registry_period_s  seconds between two looks at the URL, from the end of one to the start of the next
    """

    registry_period_s: float = 10.0

    def __post_init__(self) -> None:
        valid = 1 <= self.registry_period_s <= 86_400
        require(valid, "registry_period_s", self.registry_period_s, "1 to 86400 seconds")


@dataclass(frozen=True)
class GeneratedRegistrySettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    registry_url  where the registry is, whose copy the model reads; empty: nowhere else
    """

    registry_url: str = ""


class RegistryFollower:
    """Updates the copy `period_s` seconds after it was updated last, until `close`; without `update`, nothing.

    An update runs on a thread of its own. It has failed while it has not ended after `limit_s` seconds; no second one
    is started meanwhile. The first one is waited for as long. Each failure is counted, and logged once.
    """

    def __init__(self, update: Update | None, url: str, period_s: float, log: Log, limit_s: float = _LIMIT_S) -> None:
        self._url = url
        self._period_s = period_s
        self._limit_s = limit_s
        self._log = log
        self._failures = Counter("registry_fetch_failures_total", "Looks at a registry's URL, or entries, that failed")
        self._stop = threading.Event()
        self.metrics: list[Metric] = []
        if update is not None:
            self.metrics.append(self._failures)
            looked = threading.Event()
            threading.Thread(target=self._run, args=(update, looked), name="registry_url", daemon=True).start()
            looked.wait(limit_s)

    def close(self) -> None:
        """Change nothing from now on. The threads may be waiting for the URL: they are not waited for."""
        self._stop.set()

    def _run(self, update: Update, looked: threading.Event) -> None:
        running: Future[Mapping[str, str]] | None = None
        reported: set[str] = set()
        while not self._stop.is_set():
            running = running or self._start(update)
            try:
                problems = running.result(self._limit_s)
                running = None
            except TimeoutError:
                problems = {"": f"{self._url} has not been read after {self._limit_s:g} s"}
            if not self._stop.is_set():
                self._report(problems, reported)
                reported = set(problems)
            looked.set()
            self._stop.wait(self._period_s)

    def _start(self, update: Update) -> Future[Mapping[str, str]]:
        """One update: what went wrong, by what is logged once. Threads of a pool would hold up the end of a process."""
        outcome: Future[Mapping[str, str]] = Future()

        def run() -> None:
            try:
                problems = update(lambda: not self._stop.is_set())
            except ShapeshiftError as error:
                problems = {"": str(error)}
            except Exception as error:  # noqa: BLE001  reported; the next one is tried
                problems = {"": f"{type(error).__name__}: {error}"}
            outcome.set_result(problems)

        threading.Thread(target=run, name="registry_fetch", daemon=True).start()
        return outcome

    def _report(self, problems: Mapping[str, str], reported: set[str]) -> None:
        for key, text in problems.items():
            self._failures.add()
            if key not in reported:
                self._log(f"the copy of the registry is left as it is: {text}")


def follow(parameters: Mapping[str, str], folder: Path, layout: Layout, log: Log) -> RegistryFollower:
    """Follow the URL that the parameters name, if any, with a copy in `folder`.

    Raises InvalidInputError for an invalid URL, UnsupportedError without its packages.
    """
    url = settings.read(GeneratedRegistrySettings, parameters).registry_url
    update = _MIRRORS["fsspec"]("registry_url", url, layout, folder).update if url else None
    return RegistryFollower(update, url, settings.read(RegistrySettings, parameters).registry_period_s, log)
