"""The processes of ranks 1 and up: started by rank 0, watched, and ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

from shapeshift import installation
from shapeshift.errors import EngineError
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.member import RankSpec

START_S = 600.0
"""Most seconds that a child takes to load its part of the weights."""
_CONNECT_S = 60.0
_PAUSE_S = 0.01


class RankProcess:
    """One child. It ends when its parent does, even if the parent is killed: it inherits one end of a pipe, and the
    kernel closes the other.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self._connection, inherited = Pipe()
        paths = [str(installation.IMPORT_PATH), os.environ.get("PYTHONPATH", "")]
        with inherited:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", "shapeshift.fused_decode.rank", str(spec.rank)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=inherited.fileno(),
                stdout=subprocess.DEVNULL,
                # Ctrl-C in a terminal reaches only the parent.
                start_new_session=True,
            )
        self.send(spec.to_json())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, content: bytes) -> None:
        """Give the child a message, which it reads at once, whatever it computes. Raises OSError where it is gone."""
        self._connection.send_bytes(content)

    def wait(self, timeout_s: float) -> None:
        """Wait until the child has loaded its part; again: until it is connected. Raises EngineError."""
        reason = f"it has not started within {timeout_s:.0f} s"
        try:
            if self._connection.poll(timeout_s):
                reason = str(json.loads(self._connection.recv_bytes())["error"])
        except (EOFError, OSError):
            reason = "its process has ended; its messages are in the log"
        if reason:
            raise EngineError(f"rank {self.rank}: {reason}")

    def ended(self) -> str:
        """That the child has ended, as an error text; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"rank {self.rank} (pid {self.pid}) has ended with {code}"

    def kill(self) -> None:
        """End the child now. Safe to call again."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class Launcher:
    """Starts the children of one model, again after each `stop`; never after `close`, which any thread may call.

    spec: of rank 0
    """

    def __init__(self, spec: RankSpec, group: RankGroup) -> None:
        self._spec, self._group = spec, group
        self._lock = threading.Lock()
        self._children: tuple[RankProcess, ...] = ()
        self._folder: Path | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [child.pid for child in self._children]

    def start(self) -> None:
        """Start the children, which begin to load; `connect` waits for them."""
        with self._lock:
            self._require_open()
            self._folder = Path(tempfile.mkdtemp(prefix="shapeshift-ranks-"))
            for rank in range(1, self._spec.ranks):
                device = device_of(self._spec.device, rank)
                spec = replace(self._spec, rank=rank, device=device, meeting=str(self._meeting))
                self._children += (RankProcess(spec),)

    def connect(self) -> None:
        """Wait until all children have loaded, and connect the group. Raises EngineError."""
        try:
            for child in self._children:
                child.wait(START_S)
            self._require_open()
            self._group.connect(self._meeting, _CONNECT_S)
            # They read the file of the meeting until then.
            for child in self._children:
                child.wait(_CONNECT_S)
        except RuntimeError as error:
            raise EngineError(f"the ranks cannot connect: {self.ended() or error}") from error
        finally:
            self._remove_folder()

    def send(self, content: bytes) -> None:
        """To all children. Raises OSError where one is gone."""
        for child in self._children:
            child.send(content)

    def ended(self, patience_s: float = 0.0) -> str:
        """Which child has ended, as an error text; empty where none has within `patience_s`."""
        limit = time.monotonic() + patience_s
        while True:
            line = next(filter(None, (child.ended() for child in self._children)), "")
            if line or time.monotonic() >= limit:
                return line
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """End all children and leave the group. Safe to call again."""
        with self._lock:
            for child in self._children:
                child.kill()
            self._children = ()
        self._group.close()
        self._remove_folder()

    def close(self) -> None:
        """End all children for good."""
        self._closed = True
        self.stop()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the model is being unloaded")

    @property
    def _meeting(self) -> Path:
        assert self._folder is not None, "the ranks are not being started"
        return self._folder / "ranks"

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def device_of(first: str, rank: int) -> str:
    """The device of a rank: the CPU of all, or as many GPUs after that of rank 0."""
    kind, _, number = first.partition(":")
    return f"{kind}:{int(number) + rank}" if number else kind
