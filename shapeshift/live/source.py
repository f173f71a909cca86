"""One running server, looked at once a second: its metrics page, what `shapeshift status` says, and the rings."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shapeshift.errors import ShapeshiftError
from shapeshift.live.counters import Change, LivePages, Page
from shapeshift.loops import Loop
from shapeshift.serving import events
from shapeshift.serving.events import Event, RingReader
from shapeshift.sidecar import run_files
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.overview import overview
from shapeshift.sidecar.servers import Servers, connect
from shapeshift.triton import metrics
from shapeshift.triton.embedded.process_tracker import ProcessTracker
from shapeshift.triton.endpoint import tls_from_environment

PERIOD_S = 1.0
RATE_S = 10.0
"""Over so long rates are taken."""
LAST_RATE = f"last {RATE_S:.0f} s"
HISTORY_S = 60.0
_CALL = "pack"
_MOST_EVENTS = 6000
"""Of one kind and model."""
# Between two questions for models and processes: dearer than a scrape, and a heartbeat is to move in that time.
_STATUS_S = 2.5
SERVES = "serving"


class Addresses(NamedTuple):
    """Of a server. grpc, http: HOST:PORT; metrics: URL; key: of model control; run_directory: of `shapeshift serve`."""

    grpc: str
    http: str
    metrics: str
    key: str
    run_directory: Path


@dataclass(frozen=True, eq=False)
class View:
    """What is known now. Panels draw it and change nothing.

    now       monotonic seconds
    change    what the counters did in the last `RATE_S` seconds; `change.new` is the last page
    minute    the same of the last `HISTORY_S`
    events    by model, of the last `HISTORY_S`, in order
    status    as `shapeshift status --json`; empty where it could not be asked
    silent    models whose last process has ended or hangs since then
    decisions  of the sidecar, the last ones last
    """

    now: float
    change: Change
    minute: Change
    events: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    silent: Sequence[str] = ()
    decisions: Sequence[Mapping[str, str]] = ()

    @property
    def minute_s(self) -> float:
        """How long `minute` is: events are counted over the same time."""
        return min(max(self.minute.seconds, 1.0), HISTORY_S)

    @property
    def minute_words(self) -> str:
        """The same in words: the page may not have been open for a minute."""
        return "last minute" if self.minute_s > HISTORY_S - 5 else f"last {self.minute_s:.0f} s"

    @property
    def page(self) -> Page:
        """The last scrape."""
        return self.change.new

    def busiest(self, models: Iterable[str]) -> list[str]:
        """The models, those with the most requests in the last minute first."""
        key = "requests_total"
        return sorted(models, key=lambda one: (-self.minute.total(one, key), -self.page.total(one, key), one))

    def recent(self, model: str, kind: str, seconds: float) -> list[Event]:
        """The events of one kind in the last seconds, in order."""
        since = self.now - seconds
        return [event for event in self.events.get(model, ()) if event.kind == kind and event.at >= since]


class Pages:
    """The scrapes of the last `HISTORY_S`, without those before a gap of `RATE_S`."""

    def __init__(self) -> None:
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """Add a scrape, later than all before."""
        if self._pages and page.at - self._pages[-1].at > RATE_S:
            self._pages.clear()
        self._pages.append(page)
        while self._pages[0].at < page.at - HISTORY_S:
            self._pages.popleft()

    def change(self) -> Change:
        """What happened in the last `RATE_S` before the last scrape."""
        new = self._pages[-1]
        old = next((page for page in reversed(self._pages) if page.at <= new.at - RATE_S), self._pages[0])
        return Change(old, new)

    def minute(self) -> Change:
        """What happened in the last `HISTORY_S` before it."""
        return Change(self._pages[0], self._pages[-1])


class Followed(Protocol):
    """What a page is about: a `Source`, or a simulated server, which has no address to call."""

    addresses: Addresses
    view: View | None
    problem: str

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Source:
    """Follows one server on a thread of its own, while somebody watches.

    addresses()  where the server is: asked again whenever it does not answer
    is_watched() whether anybody looks at the page
    view         the last one; None before the first
    problem      why the view is not of now; empty while the server answers
    """

    def __init__(
        self,
        addresses: Callable[[], Addresses],
        is_watched: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.addresses = addresses()
        self.view: View | None = None
        self.problem = "not asked yet"
        self._find = addresses
        self._is_watched = is_watched
        self._clock = clock
        self._pages = Pages()
        self._live = LivePages()
        self._rings = Rings()
        self._servers: Servers | None = None
        self._tracker = ProcessTracker(True)
        self._status: Mapping[str, Any] = {}
        self._last_page: MetricsPage | None = None
        self._loop = Loop("source", self._round, self._report)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """End it."""
        self._loop.stop(3.0)

    def look(self) -> None:
        """One look at the server: replaces `view`, or says in `problem` why not."""
        now = self._clock()
        try:
            samples = metrics.scrape(self.addresses.metrics, tls=tls_from_environment())
        except ShapeshiftError as error:
            self._lost(str(error))
            return
        self._pages.add(self._live.page(samples, now))
        self._ask_status(MetricsPage(samples, now))
        self._rings.read(self.addresses.run_directory / "events", now)
        # Later than `now`: what was recorded meanwhile is not of the future.
        self.view = View(
            self._clock(),
            self._pages.change(),
            self._pages.minute(),
            self._rings.events(),
            self._status,
            self._live.silent(now, now - HISTORY_S),
            run_files.read_report(self.addresses.run_directory).get("decisions", []),
        )
        self.problem = ""

    def _round(self) -> float:
        if self._is_watched():
            self.look()
        return PERIOD_S

    def _report(self, problem: str) -> None:
        # The page says so, and goes on asking.
        self.problem = f"the answer cannot be used: {problem}"

    def _lost(self, problem: str) -> None:
        self.problem = problem
        self._servers, self._status, self._last_page = None, {}, None
        with contextlib.suppress(ShapeshiftError):
            self.addresses = self._find()

    def _ask_status(self, page: MetricsPage) -> None:
        before = self._last_page
        if before is not None and page.at - before.at < _STATUS_S:
            return
        self._last_page = page
        if before is None:
            # Whether a heartbeat moves shows the next page.
            return
        at = self.addresses
        try:
            self._servers = self._servers or connect(at.grpc, at.metrics, at.key)
            pages = iter((before, page))
            servers = replace(self._servers, scrape=lambda: next(pages))
            self._status = overview(servers, at.run_directory, self._tracker, 0.0, lambda seconds: None)
        except ShapeshiftError:
            self._servers, self._status = None, {}


class Rings:
    """The rings of a server's processes."""

    def __init__(self) -> None:
        self._readers: dict[Path, RingReader] = {}
        self._events: dict[str, RecentEvents] = {}

    def read(self, folder: Path, now: float) -> None:
        """Read what is new; forget what is older than `HISTORY_S`."""
        files = set(folder.glob(f"*{events.SUFFIX}")) if folder.is_dir() else set()
        for gone in self._readers.keys() - files:
            self._readers.pop(gone).close()
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                model = events.model_of(file)
                if file in self._readers and self._readers[file].is_replaced:
                    self._readers.pop(file).close()
                if file not in self._readers:
                    self._readers[file] = RingReader(file)
                    if model in self._events and not any(events.model_of(other) == model for other in files - {file}):
                        self._events[model].end()
                self._events.setdefault(model, RecentEvents()).add(self._readers[file].read())
        for recent in self._events.values():
            recent.forget(now - HISTORY_S)

    def events(self) -> dict[str, list[Event]]:
        """By model, in order."""
        return {model: recent.events() for model, recent in self._events.items()}


class RecentEvents:
    """Of one model: the last ones of each kind, and those of requests that hold slots, however long they do."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # With the number of each, which is their order.
        self._kinds: dict[str, deque[tuple[int, Event]]] = {}
        # By slot: that its request joined, and has its first token.
        self._in_slots: dict[int, list[tuple[int, Event]]] = {}

    def add(self, read: Iterable[Event]) -> None:
        """Add what was read."""
        for event in read:
            one = next(self._numbers), event
            self._kinds.setdefault(event.kind, deque(maxlen=_MOST_EVENTS)).append(one)
            self._note_slot(one)

    def end(self) -> None:
        """The process has ended: engine calls are over once they are recorded, all else went with it."""
        self._kinds = {kind: recent for kind, recent in self._kinds.items() if kind == _CALL}
        self._in_slots = {}

    def forget(self, before: float) -> None:
        """Forget what was recorded before that time."""
        for kind in self._kinds.values():
            while kind and kind[0][1].at < before:
                kind.popleft()

    def events(self) -> list[Event]:
        """All of them, in order."""
        numbered = dict(itertools.chain(*self._kinds.values(), *self._in_slots.values()))
        return [numbered[number] for number in sorted(numbered)]

    def _note_slot(self, one: tuple[int, Event]) -> None:
        kind, values = one[1].kind, one[1].values
        stay = self._in_slots.get(values.get("slot", -1), [])
        if kind in ("join", "leave"):
            self._in_slots = {slot: other for slot, other in self._in_slots.items() if other is not stay}
        if kind == "join":
            slots = values["slots"]
            self._in_slots |= dict.fromkeys(slots if isinstance(slots, list) else [values["slot"]], [one])
        elif kind == "first":
            stay.append(one)
        elif kind == "clear":
            self._in_slots = {}
