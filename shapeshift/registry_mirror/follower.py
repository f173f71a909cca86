"""Follows a registry at a URL: threads beside those that serve keep its local copy up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shapeshift import settings
from shapeshift.errors import ShapeshiftError
from shapeshift.registry import Layout
from shapeshift.serving.metrics import Counter, Metric
from shapeshift.serving.model_args import Log
from shapeshift.settings import Choices, require


class Mirror(Protocol):
    """See `mirror.Mirror`."""

    def update(self, is_wanted: Callable[[], bool]) -> dict[str, str]: ...


_LIMIT_S = 20.0
# A server without a URL imports none of it.
_MIRRORS: Choices[Callable[[str, str, Layout, Path], Mirror]] = Choices(
    "registry_url", {"fsspec": "shapeshift.registry_mirror.mirror:open_mirror"}
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
    """Updates the copy `period_s` seconds after it was updated last, until `close`; without a mirror, nothing.

    An update runs on a thread of its own. It has failed while it has not ended after `limit_s` seconds; no second one
    is started meanwhile. The first one is waited for as long. Each failure is counted, and logged once.
    """

    def __init__(self, mirror: Mirror | None, url: str, period_s: float, log: Log, limit_s: float = _LIMIT_S) -> None:
        self._mirror = mirror
        self._url = url
        self._period_s = period_s
        self._limit_s = limit_s
        self._log = log
        self._failures = Counter("registry_fetch_failures_total", "Looks at a registry's URL, or entries, that failed")
        self._stop = threading.Event()
        self._looked = threading.Event()
        self._running: _Look | None = None
        self._told: set[str] = set()
        if mirror is not None:
            threading.Thread(target=self._run, args=(mirror,), name="registry_url", daemon=True).start()
            self._looked.wait(limit_s)

    @property
    def metrics(self) -> list[Metric]:
        return [self._failures] if self._mirror is not None else []

    def close(self) -> None:
        """Change nothing from now on. The threads may be waiting for the URL: they are not waited for."""
        self._stop.set()

    def _run(self, mirror: Mirror) -> None:
        while not self._stop.is_set():
            self._report(self._look(mirror))
            self._looked.set()
            self._stop.wait(self._period_s)

    def _look(self, mirror: Mirror) -> Mapping[str, str]:
        """What went wrong, by what is told once."""
        look = self._running or _Look(mirror, lambda: not self._stop.is_set())
        has_ended = look.ended.wait(self._limit_s)
        self._running = None if has_ended else look
        return look.problems if has_ended else {"": f"{self._url} has not been read after {self._limit_s:g} s"}

    def _report(self, problems: Mapping[str, str]) -> None:
        if self._stop.is_set():
            return
        for key, text in problems.items():
            self._failures.add()
            if key not in self._told:
                self._log(f"the copy of the registry is left as it is: {text}")
        self._told = set(problems)


class _Look:
    """One update on a thread of its own."""

    def __init__(self, mirror: Mirror, is_wanted: Callable[[], bool]) -> None:
        self.problems: Mapping[str, str] = {}
        self.ended = threading.Event()
        self._mirror = mirror
        self._is_wanted = is_wanted
        threading.Thread(target=self._run, name="registry_fetch", daemon=True).start()

    def _run(self) -> None:
        try:
            self.problems = self._mirror.update(self._is_wanted)
        except ShapeshiftError as error:
            self.problems = {"": str(error)}
        except Exception as error:  # noqa: BLE001  told by the follower, which goes on
            self.problems = {"": f"{type(error).__name__}: {error}"}
        self.ended.set()


def follow(parameters: Mapping[str, str], folder: Path, layout: Layout, log: Log) -> RegistryFollower:
    """Follow the URL that the parameters name, if any, with a copy in `folder`.

    Raises InvalidInputError for an invalid URL, UnsupportedError without its packages.
    """
    url = settings.read(GeneratedRegistrySettings, parameters).registry_url
    mirror = _MIRRORS["fsspec"]("registry_url", url, layout, folder) if url else None
    return RegistryFollower(mirror, url, settings.read(RegistrySettings, parameters).registry_period_s, log)
