"""Processes that are killed, stopped for a while, or told to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

from bench.drill import models
from bench.drill.faults.scene import Fault, Scene
from shapeshift.triton.embedded import processes

STOPPED_S = 10.0
WHOLE_S, WHOLE_AFTER_STOP_S = 3.0, 15.0
# `serve` ends its server in this time before it ends itself.
_SERVE_ENDS_S = 10.0
# A stopped process takes requests for a second of heartbeats and three scrapes, until the sidecar kills it.
_STANDS_S = 5.0
_EVERY_FRONT = (
    *("encode", models.WITH_WORKERS, "classify_text", "classify_image"),
    *("generate", "generate_unary", "generate_lora", "generate_lora_unary"),
)

# What each is called in the table, its role, and the fronts whose requests it holds. Another process holds those that
# a worker and a forwarding front have been given by it, or have given to it.
_TARGETS = (
    ("a front", "encode", ("encode",)),
    ("a worker", f"{models.WITH_WORKERS}_w00", ()),
    ("a forwarding front", "generate_unary", ("generate_unary",)),
    ("the decode process", "generate", ("generate",)),
    ("the sidecar", "sidecar", ()),
    ("the server", "server", _EVERY_FRONT),
    ("serve", "serve", _EVERY_FRONT),
)
_QUICK = {("encode", signal.SIGKILL), (f"{models.WITH_WORKERS}_w00", signal.SIGKILL), ("generate", signal.SIGKILL)}
_QUICK |= {("generate_unary", signal.SIGKILL), ("sidecar", signal.SIGKILL)}


def faults() -> Iterator[Fault]:
    """Each signal to each process."""
    for said, role, holders in _TARGETS:
        for number in (signal.SIGKILL, signal.SIGTERM):
            within_s = WHOLE_S + (_SERVE_ENDS_S if role == "serve" else 0.0)
            yield Fault(
                f"{number.name} {said}",
                partial(_send, role, number),
                within_s,
                restarts=role in ("server", "serve"),
                holders=holders,
                quick=(role, number) in _QUICK,
            )
        # The sidecar kills what stands still, with the requests that it has taken.
        yield Fault(
            f"SIGSTOP {said}, {STOPPED_S:g} s",
            partial(_stop, role),
            WHOLE_AFTER_STOP_S,
            holders=() if role in ("server", "serve") else holders,
            held_s=_STANDS_S,
        )


def _send(role: str, number: signal.Signals, scene: Scene) -> bool:
    os.kill(scene.site.pid(role), number)
    return True


def _stop(role: str, scene: Scene) -> bool:
    stopped = processes.identify(scene.site.pid(role))
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    if processes.is_alive(stopped):
        os.kill(stopped.pid, signal.SIGCONT)
    else:
        scene.say(f"{role}: replaced while it was stopped")
    return True
