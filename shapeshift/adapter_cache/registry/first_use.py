"""Adapters that are fetched when a request first names them, each by a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shapeshift.child_process import environment
from shapeshift.errors import InvalidInputError, ModelError, OverloadedError, TimedOutError
from shapeshift.serving.bounds import unloading

_PROGRAM = "shapeshift.build_engines.hub.adapter_process"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_MOST_PROCESSES = 4
_MOST_WAITING = 64
"""Adapters that are being fetched or wait for it; a request for a further one gets UNAVAILABLE."""
_MOST_REFUSED = 1000
_CLOSING_S = 3.0
_PAUSE_S = 30.0
"""Seconds for which a failure is the answer to further requests."""

Add = Callable[[str, Path, str], None]
"""Has requests name an adapter, of its name, folder and hash. Raises ShapeshiftError."""
Done = Callable[[Exception | None], None]


class FirstUse:
    """Fetches what `sources` allow. Any thread calls the methods; each fetch calls `add` and `done` on its own thread.

    sources     folders, absolute, and beginnings of hub ids
    record      the folder that remembers the commit of each id
    most_bytes  of a file
    timeout_s   after which a fetch is ended, and one that has not begun
    """

    def __init__(self, sources: list[str], record: Path, most_bytes: int, add: Add, timeout_s: float) -> None:
        self._folders = [source for source in sources if source.startswith("/")]
        self._prefixes = tuple(source for source in sources if not source.startswith("/"))
        self._record, self._most_bytes, self._add, self._timeout_s = record, most_bytes, add, timeout_s
        self._waiting: dict[str, list[Done]] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._threads: set[threading.Thread] = set()
        self._refused: dict[str, tuple[float, Exception]] = {}
        self._is_closed = False
        self._places = threading.Semaphore(_MOST_PROCESSES)
        self._lock = threading.Lock()

    def allows(self, name: str) -> bool:
        """Whether `name` may be one of an allowed folder, or is an id with an allowed beginning, without a revision.

        Raises InvalidInputError for any other id.
        """
        if "/" not in name:
            return bool(self._folders) and _FOLDER_NAME.fullmatch(name) is not None
        # A revision may be that of a pull request, by anyone.
        if _HUB_NAME.fullmatch(name) is None or not name.startswith(self._prefixes):
            allowed = ", ".join(self._prefixes) or "none"
            raise InvalidInputError(
                "lora_name", name, f"an id owner/adapter that begins as adapter_sources allows: {allowed}"
            )
        return True

    def fetch(self, name: str, done: Done) -> None:
        """Call `done` when requests may name `name`, or with the error: for a while that of the last try, and
        OverloadedError where too many run. Never blocks."""
        with self._lock:
            error = self._refusal(name)
            if error is None and name in self._waiting:
                self._waiting[name].append(done)
            elif error is None:
                thread = threading.Thread(target=self._run, args=(name,), name="adapter-fetch", daemon=True)
                thread.start()
                self._threads.add(thread)
                self._waiting[name] = [done]
        if error is not None:
            done(error)

    def refuse(self, name: str, error: Exception) -> None:
        """Answer further requests for `name` with `error` for a while."""
        with self._lock:
            self._refused[name] = (time.monotonic() + _PAUSE_S, error)
            while len(self._refused) > _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]

    def close(self) -> None:
        """End what runs: its requests get UNAVAILABLE, all before this returns."""
        with self._lock:
            self._is_closed = True
            running = list(self._processes)
            threads = list(self._threads)
        for process in running:
            process.kill()
        until = time.monotonic() + _CLOSING_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _refusal(self, name: str) -> Exception | None:
        """Why a request for `name` fails now."""
        if self._is_closed:
            return unloading()
        until, error = self._refused.get(name, (0.0, None))
        if error is not None and time.monotonic() < until:
            return error
        if name not in self._waiting and len(self._waiting) >= _MOST_WAITING:
            text = f"lora_name {name}: {_MOST_WAITING} adapters wait to be fetched, the most at once; retry later"
            return OverloadedError(text)
        return None

    def _run(self, name: str) -> None:
        error: Exception | None = None
        try:
            if not self._places.acquire(timeout=self._timeout_s):
                raise TimedOutError(f"lora_name {name}: {_MOST_PROCESSES} other fetches take too long; retry later")
            try:
                folder, sha256 = self._ask(name)
            finally:
                self._places.release()
            self._add(name, folder, sha256)
        except Exception as raised:  # noqa: BLE001  whatever it is, it is the answer of the requests
            # It is remembered, and its traceback would keep the requests.
            error = unloading() if self._is_closed else raised.with_traceback(None)
            self.refuse(name, error)
        with self._lock:
            waiting = self._waiting.pop(name)
        for done in waiting:
            done(error)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _ask(self, name: str) -> tuple[Path, str]:
        """The folder and the hash of the adapter. Raises ModelError with the text and the code of the process."""
        options = [name, str(self._most_bytes), str(self._record), *self._folders]
        with self._lock:
            if self._is_closed:
                raise unloading()
            # Under the lock, so that `close` misses none.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, *options],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes.add(process)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, end)
        timer.start()
        with process:
            assert process.stdout is not None
            said = process.stdout.read()
        timer.cancel()
        with self._lock:
            self._processes.discard(process)
        if late.is_set():
            raise TimedOutError(f"lora_name {name}: not fetched within {self._timeout_s:g} s; retry later")
        if process.returncode:
            raise OverloadedError(f"lora_name {name}: its fetch ended with {process.returncode}; retry later")
        outcome = json.loads(said)
        if "error" in outcome:
            raise ModelError(outcome["error"], outcome["code"])
        return Path(outcome["folder"]), outcome["sha256"]
