"""The demo: a server, its live page, and a load that changes shape; at the end, what each technique gained.

The fronts have a fifth of the time each. In it ours, its baseline and ours again have a turn under the same load.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite

from bench.common.output import FOLDER, Output, program, progress
from bench.common.server import running_server
from bench.demo.fronts import ADAPTERS, BASELINES, MODELS, publish
from bench.demo.gains import Turn, rows
from bench.demo.load import BUSY, CALM, requests, send
from shapeshift.live.counters import Change, LivePages
from shapeshift.live.source import Rings, View
from shapeshift.settings import require
from shapeshift.triton import metrics
from shapeshift.triton.embedded.guard import die_with_parent
from shapeshift.triton.embedded.server import TritonServer

TITLES = {
    "encode": "texts grow longer, and come back",
    "classify_image": "images come in bursts, with deadlines",
    "generate": "chats come and go",
    "generate_lora": "adapters follow a power law whose favourite moves",
    "classify_text": "texts are classified",
}
_SENDING = 0.75
"""Share of a turn in which requests are sent. The rest is for their answers, and for metrics to be written."""
_SETTLE_S = 2.5


@program
def main() -> int:
    """Run the demo, print and write its table; 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (%(default)g)")
    parser.add_argument("--port", type=int, default=8090, help="of the live page (%(default)s)")
    options = parser.parse_args()
    require(options.seconds >= 60, "--seconds", options.seconds, "at least 60: a turn is a fifteenth of it")
    repository = publish()
    progress("loading the models")
    with running_server(MODELS, [repository]) as server, _beside("sidecar"), _beside("live", f"--port={options.port}"):
        output = Output("demo", {"rates": BUSY, "others": CALM, "turn": f"{options.seconds / 15:g} s"})
        output.say(f"\nwatch: http://127.0.0.1:{options.port}/")
        play(server, options.seconds, output)
    output.save()
    return 0


def play(server: TritonServer, seconds: float, output: Output) -> None:
    """Send the load for so long to `server`, which serves `MODELS`, and print the table."""
    stage = Stage(server)
    table = []
    for front, title in TITLES.items():
        output.say(f"\n{front}: {title}")
        rates = {**CALM, front: BUSY[front]}
        turns = []
        for baseline in (False, True, False):
            turns.append(stage.turn(front, baseline, rates, seconds / 15))
            errors = [answer.error for answer in turns[-1].answers if not isfinite(answer.seconds)]
            words = BASELINES[front].described if baseline else "ours"
            failed = f", {len(errors)} without an answer: {errors[0][:90]}" if errors else ""
            output.say(f"  {words}: {len(turns[-1].answers)} requests{failed}")
        table += rows(front, [turns[0], turns[2]], [turns[1]])
    output.table("what each technique gained (times above 1: ours is better)", table)
    output.data["gains"] = table


class Stage:
    """One running server, on which turns are played."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._pages, self._rings = LivePages(), Rings()

    def turn(self, front: str, baseline: bool, rates: Mapping[str, float], seconds: float) -> Turn:
        """Play one turn about `front`; the same each time."""
        begin = time.monotonic()
        before = self._pages.page(metrics.scrape(self._server.metrics_url), begin)
        instead = {front: BASELINES[front]} if baseline else {}
        planned = requests(rates, seconds * _SENDING, ADAPTERS)
        drain_s = seconds * (1 - _SENDING) - _SETTLE_S
        answers = asyncio.run(send(self._server.grpc_url, planned, max(drain_s, 1.0), instead))
        time.sleep(max(_SETTLE_S, begin + seconds - time.monotonic()))
        now = time.monotonic()
        change = Change(before, self._pages.page(metrics.scrape(self._server.metrics_url), now))
        self._rings.read(self._server.settings.run_directory / "events", now)
        view = View(now, change, change, self._rings.events())
        model = instead[front].model if baseline else front
        return Turn(model, seconds * _SENDING, view, [answer for answer in answers if answer.front == front])


@contextmanager
def _beside(*arguments: str) -> Iterator[None]:
    """A command of `shapeshift` for the server, while the block runs; what it says is in a log beside the results."""
    line = [sys.executable, "-m", "shapeshift.cli.main", *arguments, f"--build={FOLDER}"]
    with (FOLDER / f"demo-{arguments[0]}.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, preexec_fn=die_with_parent())
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    sys.exit(main())
