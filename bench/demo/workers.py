"""Four workers with a bin each, while texts grow longer: the sidecar moves them, and heals the one that is killed.

The workers are emulated: they wait as long as a measured engine computes, as workers on devices of their own would.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.output import FOLDER, empty
from bench.demo.gains import Turn
from bench.demo.load import FIRST_TOKENS
from bench.polymorph.fleet import emulated_front
from shapeshift.live import encode
from shapeshift.sidecar import run_files
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.metrics import HEARTBEAT, scrape

FRONT = "encode_workers"
COUNT = 4
FIRST_PLAN = "the first plan, frozen"
PLAN_S = 4.0
"""Between two plans: the texts of the demo change within seconds, and a plan needs 50 of them."""
_VICTIM = f"{FRONT}_w00"
_HEALED_S = 15.0
_SLO_MS = 450


def publish() -> Path:
    """Write the front and its workers, planned for the texts that come first; returns their repository."""
    folder = FOLDER / "demo-workers"
    empty(folder)
    first = np.random.default_rng(0).lognormal(np.log(FIRST_TOKENS), 0.3, 500)
    settings = {"workers": COUNT, "min_workers": COUNT, "max_queue_ms": 0, "slo_ms": _SLO_MS}
    return emulated_front(folder, FRONT, first.astype(int).tolist(), bins="64,128,256,512", **settings)


@contextmanager
def frozen(server: TritonServer) -> Iterator[None]:
    """The sidecar decides, and moves nothing."""
    run_files.freeze(server.settings.run_directory)
    try:
        yield
    finally:
        run_files.thaw(server.settings.run_directory)


def kill_and_watch(server: TritonServer, after_s: float) -> str:
    """Kill a worker after so many seconds; says how long it took until another process of it served."""
    time.sleep(after_s)
    killed, start = _living(server), time.monotonic()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while time.monotonic() - start < _HEALED_S:
        if _living(server) - killed:
            return f"a worker was killed, and served again after {time.monotonic() - start:.1f} s"
        time.sleep(0.2)
    return f"a worker was killed, and did not serve again within {_HEALED_S:g} s"


def played(turn: Turn) -> dict[str, Any]:
    """A turn as `bench.demo.plot` draws it, in seconds since it began.

    texts: when one came, its words, and after how long it was answered, null where it was not. bins: of each worker,
    the bins that it had: tokens, from and until when.
    """
    texts = [
        (
            round(request.at, 2),
            len(str(request.inputs["TEXT"][0][0]).split()),
            round(answer.seconds, 3) if isfinite(answer.seconds) else None,
        )
        for request, answer in zip(turn.requests, turn.answers, strict=True)
    ]
    bins = {}
    for worker in (f"{FRONT}_w{number:02}" for number in range(COUNT)):
        runs = encode.runs_of(encode.calls_of(turn.view, worker, turn.view.change.seconds))
        bins[worker] = [(size, round(begin - turn.began, 2), round(end - turn.began, 2)) for size, begin, end in runs]
    return {"texts": texts, "bins": bins}


def _living(server: TritonServer) -> set[int]:
    """The process of the worker, where it serves."""
    labels = [dict(of) for name, of in scrape(server.metrics_url, 5.0) if name == HEARTBEAT]
    pids = (int(of["pid"]) for of in labels if of.get("model") == _VICTIM)
    return {pid for pid in pids if processes.stub(pid) is not None}
