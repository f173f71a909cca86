"""The demo: a server, its live page, and a load that changes shape; at the end, what each technique gained.

In each act ours, its baseline and ours again have a turn under the same load. Of the workers, whose plan the texts
change, the first plan has the first turn.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from typing import Any

from bench.common.output import FOLDER, Output, program, progress
from bench.demo import workers
from bench.demo.fronts import ADAPTERS, BASELINES, MODELS, Baseline, publish
from bench.demo.gains import Turn, rows
from bench.demo.load import BUSY, CALM, Answer, requests, send
from bench.polymorph.fleet import running_fleet
from shapeshift.live.counters import Change, LivePages
from shapeshift.live.source import Rings, View
from shapeshift.settings import require
from shapeshift.triton import metrics
from shapeshift.triton.embedded.guard import die_with_parent
from shapeshift.triton.embedded.server import TritonServer

TITLES = {
    "encode": "texts grow longer, and come back",
    workers.FRONT: "texts grow longer over four workers with a bin each (emulated), and one is killed",
    "classify_image": "images come in bursts, with deadlines",
    "generate": "chats come and go",
    "generate_lora": "adapters follow a power law whose favourite moves",
    "classify_text": "texts are classified",
}
_SENDING = 0.75
"""Share of a turn in which requests are sent. The rest is for their answers, and for metrics to be written."""
_SETTLE_S = 2.5
_READS_S = 0.5
_TURNS_OF_WORKERS = 4
_TURNS = 3 * len(BASELINES) + _TURNS_OF_WORKERS
"""A turn of the workers takes twice as long as the others: a move takes seconds."""


@program
def main() -> int:
    """Run the demo, print and write its table; 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (%(default)g)")
    parser.add_argument("--workers-only", action="store_true", help="play the two turns of the workers alone")
    parser.add_argument("--port", type=int, default=8090, help="of the live page (%(default)s)")
    options = parser.parse_args()
    require(options.seconds >= 60, "--seconds", options.seconds, "at least 60: the turns share them")
    titles = {workers.FRONT: TITLES[workers.FRONT]} if options.workers_only else TITLES
    repositories = [workers.publish(), *([] if options.workers_only else [publish()])]
    loaded = dict.fromkeys([] if options.workers_only else MODELS, 0)
    progress("loading the models")
    with (
        running_fleet(FOLDER, repositories, {**loaded, workers.FRONT: workers.COUNT}, workers.PLAN_S) as server,
        _live_page(options.port),
    ):
        turn_s = options.seconds / (_TURNS_OF_WORKERS if options.workers_only else _TURNS)
        output = Output("demo", {"rates": BUSY, "others": CALM, "turn": f"{turn_s:.3g} s"})
        output.say(f"\nwatch: http://127.0.0.1:{options.port}/")
        play(server, turn_s, titles, output)
    output.save()
    return 0


def play(server: TritonServer, turn_s: float, titles: Mapping[str, str], output: Output) -> None:
    """Play the turns of these fronts, which `server` serves, and print the table."""
    stage = Stage(server)
    table = []
    for front, title in titles.items():
        output.say(f"\n{front}: {title}")
        rates = {**({} if len(titles) == 1 else CALM), front: BUSY[front]}
        ours, theirs = [], []
        if front == workers.FRONT:
            over = workers.FIRST_PLAN
            with workers.frozen(server):
                theirs.append(stage.turn(front, rates, 2 * turn_s))
            _say(output, over, theirs[-1])
            with ThreadPoolExecutor(1) as beside:
                healed = beside.submit(workers.kill_and_watch, server, turn_s)
                ours.append(stage.turn(front, rates, 2 * turn_s))
            _say(output, "the sidecar at work", ours[-1])
            output.say(f"  {healed.result()}")
            sides = {over: theirs[-1], "the sidecar at work": ours[-1]}
            output.data["workers"] = {words: workers.played(turn) for words, turn in sides.items()}
        else:
            over = BASELINES[front].described
            for baseline in (None, BASELINES[front], None):
                (theirs if baseline else ours).append(stage.turn(front, rates, turn_s, baseline))
                _say(output, over if baseline else "ours", (theirs if baseline else ours)[-1])
        table += rows(front, ours, theirs, over)
    output.table("what each technique gained (times above 1: ours is better)", table)
    output.data["gains"] = table


def _say(output: Output, words: str, turn: Turn) -> None:
    errors = [answer.error for answer in turn.answers if not isfinite(answer.seconds)]
    failed = f", {len(errors)} without an answer: {errors[0][:90]}" if errors else ""
    output.say(f"  {words}: {len(turn.answers)} requests{failed}")


class Stage:
    """One running server, on which turns are played."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._pages, self._rings = LivePages(), Rings()
        self._events = server.settings.run_directory / "events"

    def turn(self, front: str, rates: Mapping[str, float], seconds: float, baseline: Baseline | None = None) -> Turn:
        """Play one turn about `front`, or about what stands in for it; the load is the same each time."""
        begin = time.monotonic()
        before = self._pages.page(metrics.scrape(self._server.metrics_url), begin)
        instead = {front: baseline} if baseline else {}
        planned = requests(rates, seconds * _SENDING, ADAPTERS)
        drain_s = seconds * (1 - _SENDING) - _SETTLE_S
        answers = asyncio.run(self._followed(send(self._server.grpc_url, planned, max(drain_s, 1.0), instead)))
        time.sleep(max(_SETTLE_S, begin + seconds - time.monotonic()))
        now = time.monotonic()
        change = Change(before, self._pages.page(metrics.scrape(self._server.metrics_url), now))
        self._rings.read(self._events, now)
        view = View(now, change, change, self._rings.events())
        model = baseline.model if baseline else front
        sent = [pair for pair in zip(planned, answers, strict=True) if pair[0].front == front]
        requests_sent, got = zip(*sent, strict=True) if sent else ((), ())
        return Turn(model, seconds * _SENDING, view, got, begin, requests_sent)

    async def _followed(self, sending: Coroutine[Any, Any, list[Answer]]) -> list[Answer]:
        """What is sent; the rings are read meanwhile, as that of a worker that is moved goes with its process."""
        task = asyncio.create_task(sending)
        while not task.done():
            self._rings.read(self._events, time.monotonic())
            await asyncio.wait([task], timeout=_READS_S)
        return task.result()


@contextmanager
def _live_page(port: int) -> Iterator[None]:
    """The server's live page, while the block runs; what it says is in a log beside the results."""
    line = [sys.executable, "-m", "shapeshift.cli.main", "live", f"--port={port}", f"--build={FOLDER}"]
    with (FOLDER / "demo-live.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, preexec_fn=die_with_parent())
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    sys.exit(main())
