"""`make bench BENCH=shared_cores`: models alone and two at a time on one server, all of which may use every core.

Closed loops keep each busy model saturated. A round measures every model alone and every pair, in random order; a
pair's shares are taken within the round, so that other load on the machine affects both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.foreign_load import ForeignLoad
from bench.common.output import BUILD, Output, Row, program, progress
from bench.common.server import running_server, wait_loaded
from bench.common.texts import closed_loop
from client.open_loop import PlannedRequest, serialise
from shapeshift.cli.served_models import with_called
from shapeshift.engines import hardware, manifest
from shapeshift.errors import InvalidInputError
from shapeshift.triton import model_config
from shapeshift.workloads import lengths
from shapeshift.workloads.text import TextMaker

_REPOSITORY = BUILD / "repository"
_TOKENS = 32
# From the start of the loops until all clients wait for an answer.
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Scale:
    """How much is measured. seconds: of each load of a round; clients: closed loops of each busy model."""

    rounds: int
    seconds: float
    clients: int


QUICK, FULL = Scale(3, 3.0, 16), Scale(12, 5.0, 16)

Busy = tuple[str, ...]
"""The models that are busy at once, in the order of the command line."""


@dataclass(frozen=True)
class Cell:
    """One load of one round.

    rates    answers a second of each busy model while all of them are busy
    answers  of each busy model, with those before and after that time
    cpu_s    processor time of server and client for these answers
    foreign  cores that other processes used
    """

    rates: Mapping[str, float]
    answers: Mapping[str, int]
    cpu_s: float
    foreign: float


Round = Mapping[Busy, Cell]


def loads(models: Sequence[str]) -> list[Busy]:
    """Each model alone, then each two."""
    return [*((model,) for model in models), *itertools.combinations(models, 2)]


def pair_rows(rounds: Sequence[Round]) -> list[Row]:
    """Each pair of busy models; medians over the rounds, whose loads alone and together are compared within a round.

    share        the rate of each over half of its rate alone
    both         the mean of both shares, with its least and most. 1: they get as much done as taking turns
    of CPU       the same for processor time: what the answers would have cost alone, over what they cost. Other load on
                 the machine, which distorts rates, hardly changes it
    """
    rows: list[Row] = []
    for pair in [busy for busy in rounds[0] if len(busy) == 2]:
        shares = [[cells[pair].rates[model] / (cells[(model,)].rates[model] / 2) for cells in rounds] for model in pair]
        both = np.mean(shares, axis=0)
        row: dict[str, object] = {"pair": " and ".join(pair)}
        for number, (model, of_model) in enumerate(zip(pair, shares, strict=True), 1):
            row[f"answers/s {number}"] = float(np.median([cells[pair].rates[model] for cells in rounds]))
            row[f"share {number}"] = float(np.median(of_model))
        row |= {"both": float(np.median(both)), "least": float(both.min()), "most": float(both.max())}
        rows.append(row | {"of CPU": float(np.median([_alone_s(pair, one) / one[pair].cpu_s for one in rounds]))})
    return rows


def _alone_s(pair: Busy, cells: Round) -> float:
    """The processor time that the answers of a pair would have cost alone, in seconds."""
    alone = {model: cells[(model,)].cpu_s / cells[(model,)].answers[model] for model in pair}
    return sum(cells[pair].answers[model] * alone[model] for model in pair)


def alone_rows(rounds: Sequence[Round]) -> list[Row]:
    """Each model alone: answers a second, and processor time of server and client for one."""
    rows: list[Row] = []
    for busy in [busy for busy in rounds[0] if len(busy) == 1]:
        cells, (model,) = [one[busy] for one in rounds], busy
        ms = float(np.median([1e3 * cell.cpu_s / cell.answers[model] for cell in cells]))
        rows.append({"alone": model, "answers/s": float(np.median([c.rates[model] for c in cells])), "CPU ms": ms})
    return rows


@program
def main() -> int:
    """Measure, print, and write table and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.shared_cores", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of 3 s, about a minute and a half")
    parser.add_argument("--models", default="encode,classify_text,generate_unary", help="fronts, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    models = tuple(options.models.split(","))
    payloads = {model: _payloads(model, options.seed) for model in models}
    settings = {
        "seed": options.seed,
        "rounds": scale.rounds,
        "seconds": scale.seconds,
        "clients": f"{scale.clients} of each busy model",
        "cores": hardware.cores(),
        "requests": f"one short text each; generate: short prompts, {_TOKENS} tokens each",
    }
    output = Output("shared_cores", settings)
    rounds = _measure(payloads, scale, options.seed)
    output.table("one model busy", alone_rows(rounds))
    output.table("two models busy; share: of half of a model's rate alone", pair_rows(rounds))
    foreign = [cell.foreign for cells in rounds for cell in cells.values()]
    output.say(f"\nother processes used {np.median(foreign):.2f} cores (median; most {max(foreign):.2f})")
    output.data["rounds"] = [{" and ".join(busy): vars(cell) for busy, cell in cells.items()} for cells in rounds]
    output.data["pairs"] = pair_rows(rounds)
    output.save()
    return 0


def _measure(payloads: Mapping[str, Sequence[bytes]], scale: Scale, seed: int) -> list[Round]:
    shuffle = random.Random(seed)
    rounds: list[Round] = []
    served = with_called(tuple(payloads), (_REPOSITORY,))
    with running_server(served, (_REPOSITORY,)) as server:
        wait_loaded(server.metrics_url, _engines(served))
        # The first round warms up.
        for number in range(-1, scale.rounds):
            order = loads(tuple(payloads))
            shuffle.shuffle(order)
            cells = {busy: _cell(server.grpc_url, busy, payloads, scale) for busy in order}
            if number >= 0:
                rounds.append({busy: cells[busy] for busy in loads(tuple(payloads))})
                progress(f"round {number + 1} of {scale.rounds}")
    return rounds


def _cell(url: str, busy: Busy, payloads: Mapping[str, Sequence[bytes]], scale: Scale) -> Cell:
    with ForeignLoad() as load:
        window, answered = asyncio.run(_answers(url, busy, payloads, scale))
    rates = {model: window.rate(at) for model, at in answered.items()}
    return Cell(rates, {model: len(at) for model, at in answered.items()}, load.own_s, load.cores)


class _Window:
    """When answers count: it opens once every busy model has answered a first request and all clients have sent one."""

    def __init__(self, busy: Busy, seconds: float) -> None:
        self._waiting_for = set(busy)
        self._seconds = seconds
        self._start = math.inf

    def is_open(self, model: str) -> bool:
        """Whether a client of `model` is to send another request."""
        if model in self._waiting_for:
            self._waiting_for.discard(model)
            if not self._waiting_for:
                self._start = time.monotonic() + _SETTLE_S
        return time.monotonic() < self._start + self._seconds

    def rate(self, answered: NDArray[np.float64]) -> float:
        """Answers a second; answered: when each request was answered."""
        inside = (answered >= self._start) & (answered < self._start + self._seconds)
        return float(inside.sum()) / self._seconds


async def _answers(
    url: str, busy: Busy, payloads: Mapping[str, Sequence[bytes]], scale: Scale
) -> tuple[_Window, dict[str, NDArray[np.float64]]]:
    """When each request of each busy model was answered, in monotonic seconds."""
    window = _Window(busy, scale.seconds)

    def loop(model: str) -> Coroutine[Any, Any, NDArray[np.float64]]:
        return closed_loop(url, payloads[model], scale.clients, lambda _: window.is_open(model))

    times = await asyncio.gather(*map(loop, busy))
    return window, {model: of_model[:, 1] for model, of_model in zip(busy, times, strict=True)}


def _payloads(model: str, seed: int) -> list[bytes]:
    """Requests for the front `model`. Raises InvalidInputError for one that takes neither a text nor a prompt."""
    rng = np.random.default_rng(seed)
    maker = TextMaker(rng)
    texts = [maker.text(max(3, int(length))) for length in lengths.short().sample(rng, 400)]
    config = _config(model)
    names = {tensor.name for tensor in config.input}
    if "TEXT" in names:
        inputs: list[dict[str, NDArray[Any]]] = [{"TEXT": np.array([[text]], dtype=object)} for text in texts]
    elif "text_input" in names and not config.model_transaction_policy.decoupled:
        inputs = [
            {
                "text_input": np.array([text], dtype=object),
                "max_tokens": np.array([_TOKENS], dtype=np.int32),
                "ignore_eos": np.array([True]),
            }
            for text in texts
        ]
    else:
        raise InvalidInputError("--models", model, "fronts that answer a text, or a prompt in one response")
    return serialise(model, [PlannedRequest(0.0, one) for one in inputs])


def _config(model: str) -> Any:
    file = _REPOSITORY / model / "config.pbtxt"
    if not file.is_file():
        raise InvalidInputError("--models", model, f"a model in {_REPOSITORY}; run `make engines`")
    return model_config.read(file)


def _engines(models: Sequence[str]) -> int:
    """The number of engines whose loading the metrics of `models` show. A cascade shows none of its first level."""
    text = [model for model in models if _config(model).backend == "polymorph"]
    return sum(len(manifest.load(BUILD / "engines" / model).engines) for model in text)


if __name__ == "__main__":
    sys.exit(main())
