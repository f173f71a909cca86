"""Memory near its limit, and a clock that is stepped."""

from __future__ import annotations

import resource
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.drill.faults.scene import Fault, Scene
from bench.drill.faults.signals import WHOLE_S
from shapeshift.triton.embedded import processes

_ROOM_BYTES = 16 << 20
_TIGHT_S = 6.0
_STEPS_S = (3600, -3600, 0)
_BETWEEN_S = 4.0
_SOURCE = Path(__file__).with_name("fake_clock.c")


def faults() -> Iterator[Fault]:
    """Each of them."""
    yield Fault("a front's memory near its limit", _tight_memory, WHOLE_S, holders=("encode",), held_s=_TIGHT_S)
    yield Fault("the clock stepped by an hour, both ways", _step_clock, WHOLE_S, quick=True)


def compile_clock(folder: Path) -> tuple[Path, str]:
    """The fake clock as a library to preload; and the reason where it cannot be compiled."""
    library = folder / "fake_clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return library, str(error)
    return library, done.stderr.strip() if done.returncode else ""


def set_clock(file: Path, seconds: int) -> None:
    """Shift the clock of the processes that read `file` by so many seconds."""
    with file.open("r+b" if file.exists() else "wb") as target:
        target.write(struct.pack("q", seconds))


def _tight_memory(scene: Scene) -> bool:
    """The process may map hardly more than it has; what it then does with a request is its own affair."""
    front = processes.identify(scene.site.pid("encode"))
    pages = int(Path(f"/proc/{front.pid}/statm").read_text().split()[0])
    before = resource.prlimit(front.pid, resource.RLIMIT_AS)
    resource.prlimit(front.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM_BYTES, before[1]))
    with scene.traffic.burst({"encode": scene.carried["encode"]}, int(scene.rng.integers(2**31))):
        time.sleep(_TIGHT_S)
    if processes.is_alive(front):
        resource.prlimit(front.pid, resource.RLIMIT_AS, before)
    else:
        scene.say("encode: its process ended")
    return False


def _step_clock(scene: Scene) -> bool | str:
    if not scene.clock.exists():
        return "the fake clock could not be compiled"
    for seconds in _STEPS_S:
        set_clock(scene.clock, seconds)
        time.sleep(_BETWEEN_S)
    return True
