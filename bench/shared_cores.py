"""`make bench BENCH=shared_cores`: models alone and two at a time on one server, all of which may use every core.

Closed loops keep each busy model saturated. A round measures every model alone and every pair, in random order; a
pair's shares are taken within the round, so that other load on the machine affects both sides.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.cells import Cells, Run
from bench.common.output import BUILD, Output, Row, parser, program
from bench.common.server import loaded_server
from bench.common.texts import closed_loop, short_texts
from client.open_loop import PlannedRequest, serialise
from shapeshift.cli.served_models import with_called
from shapeshift.engines import hardware, manifest
from shapeshift.errors import InvalidInputError
from shapeshift.triton import model_config

_REPOSITORY = BUILD / "repository"
_CLIENTS, _TOKENS = 16, 32
# From the start of the loops until all clients wait for an answer.
_SETTLE_S = 2.0


@dataclass(frozen=True)
class Answered:
    """One load of one round. rates: answers a second of each busy model; answers: with those outside of that time."""

    rates: Mapping[str, float]
    answers: Mapping[str, int]


Rounds = Mapping[str, Sequence[Run[Answered]]]
"""By the models that are busy at once, joined by " and "."""


def loads(models: Sequence[str]) -> list[tuple[str, ...]]:
    """Each model alone, then each two."""
    return [*((model,) for model in models), *itertools.combinations(models, 2)]


def pair_row(pair: tuple[str, str], rounds: Rounds) -> Row:
    """A pair of busy models; medians over the rounds, whose loads alone and together are compared within a round.

    share        the rate of each over half of its rate alone
    both         the mean of both shares, with its least and most. 1: they get as much done as taking turns
    of CPU       the same for processor time: what the answers would have cost alone, over what they cost. Other load on
                 the machine, which distorts rates, hardly changes it
    """
    name = " and ".join(pair)
    together, alone = rounds[name], {model: rounds[model] for model in pair}
    row: dict[str, object] = {"pair": name}
    shares = []
    for number, model in enumerate(pair, 1):
        rates = np.array([run.result.rates[model] for run in together])
        shares.append(rates / [run.result.rates[model] / 2 for run in alone[model]])
        row |= {f"answers/s {number}": float(np.median(rates)), f"share {number}": float(np.median(shares[-1]))}
    both = np.mean(shares, axis=0)
    row |= {"both": float(np.median(both)), "least": float(both.min()), "most": float(both.max())}
    costs = {model: [run.own_s / run.result.answers[model] for run in alone[model]] for model in pair}
    saved = [
        sum(run.result.answers[model] * costs[model][number] for model in pair) / run.own_s
        for number, run in enumerate(together)
    ]
    return row | {"of CPU": float(np.median(saved))}


@program
def main() -> int:
    """Measure, print, and write table and data to build/bench/."""
    parse = parser("shared_cores", __doc__, "3 rounds of 3 s, about a minute and a half")
    parse.add_argument("--models", default="encode,classify_text,generate_unary", help="fronts, separated by commas")
    options = parse.parse_args()
    rounds, seconds = (3, 3.0) if options.quick else (12, 5.0)
    models = tuple(options.models.split(","))
    payloads = {model: _payloads(model, options.seed) for model in models}
    settings = {
        "seed": options.seed,
        "rounds": rounds,
        "seconds": seconds,
        "clients": f"{_CLIENTS} of each busy model",
        "cores": hardware.cores(),
        "requests": f"one short text each; generate: short prompts, {_TOKENS} tokens each",
    }
    output = Output("shared_cores", settings)
    cells = Cells(_figures, options.seed)
    served = with_called(models, (_REPOSITORY,))
    with loaded_server(_engines(served), (_REPOSITORY,)) as server:
        runs = {" and ".join(busy): partial(_run, server.grpc_url, busy, payloads, seconds) for busy in loads(models)}
        for model in models:
            runs[model]()
        cells.measure("busy", runs, rounds)
    by_load = {name: of for (_, name), of in cells.runs.items()}
    pairs = [pair_row(pair, by_load) for pair in itertools.combinations(models, 2)]
    output.say(cells.tables())
    output.table("two models busy; share: of half of a model's rate alone", pairs)
    output.data |= {"cells": cells.records(), "pairs": pairs}
    output.save()
    return 0


def _figures(run: Run[Answered]) -> dict[str, float]:
    answers = sum(run.result.answers.values())
    return {"per_second": sum(run.result.rates.values()), "processor_ms": 1e3 * run.own_s / answers}


def _run(url: str, busy: Sequence[str], payloads: Mapping[str, Sequence[bytes]], seconds: float) -> Answered:
    start = time.monotonic() + _SETTLE_S
    end = start + seconds

    async def answered() -> list[NDArray[np.float64]]:
        loops = [closed_loop(url, payloads[one], _CLIENTS, lambda _: time.monotonic() < end) for one in busy]
        return [times[:, 1] for times in await asyncio.gather(*loops)]

    times = dict(zip(busy, asyncio.run(answered()), strict=True))
    rates = {model: float(((at >= start) & (at < end)).sum()) / seconds for model, at in times.items()}
    return Answered(rates, {model: len(at) for model, at in times.items()})


def _payloads(model: str, seed: int) -> list[bytes]:
    """Requests for the front `model`. Raises InvalidInputError for one that takes neither a text nor a prompt."""
    config = _config(model)
    names = {tensor.name for tensor in config.input}
    texts = [np.array([text], dtype=object) for text in short_texts(seed)]
    if "TEXT" in names:
        inputs: list[dict[str, NDArray[Any]]] = [{"TEXT": text[None]} for text in texts]
    elif "text_input" in names and not config.model_transaction_policy.decoupled:
        common = {"max_tokens": np.array([_TOKENS], dtype=np.int32), "ignore_eos": np.array([True])}
        inputs = [{"text_input": text, **common} for text in texts]
    else:
        raise InvalidInputError("--models", model, "fronts that answer a text, or a prompt in one response")
    return serialise(model, [PlannedRequest(0.0, one) for one in inputs])


def _config(model: str) -> Any:
    file = _REPOSITORY / model / "config.pbtxt"
    if not file.is_file():
        raise InvalidInputError("--models", model, f"a model in {_REPOSITORY}; run `make engines`")
    return model_config.read(file)


def _engines(models: Sequence[str]) -> dict[str, int]:
    """The number of engines whose loading the metrics of `models` show. A cascade shows none of its first level."""
    return {
        model: len(manifest.load(BUILD / "engines" / model).engines) if _config(model).backend == "polymorph" else 0
        for model in models
    }


if __name__ == "__main__":
    sys.exit(main())
