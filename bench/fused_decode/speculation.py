"""`python -m bench.fused_decode.speculation`: prompt lookup against the same loop without it, in one run.

    copies    the Llama of `copying`: answers that quote their prompts, with a tenth of the tokens corrected
    docstrings  the demo model goes on with beginnings of the standard library's docstrings, greedily: what it repeats,
                it repeats by itself
    random    the 110M Llama with random weights, and prompts of random words

Both loops share one model and take turns, in changing order. A ratio is the median over the rounds, of the tokens a
second with proposals over those without. The answers must be the same.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.common.foreign_load import ForeignLoad
from bench.common.output import BUILD, FOLDER, Output, progress
from bench.fused_decode import copying
from bench.fused_decode.loads import PROMPT, median
from bench.peers import random_llama
from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.engine.detokenize import TextStream, token_bytes
from shapeshift.fused_decode.engine.loop import DecodeLoop, LoopOptions
from shapeshift.fused_decode.engine.speculation import Speculator
from shapeshift.fused_decode.model import kernel_build
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams

DEMO = Path("checkpoints/docstrings-llama")
COUNTS = (1, 8, 32)
PROPOSED, SHORTEST, LONGEST = 8, 2, 4
_SLOTS, _MAX_LENGTH, _DOCSTRING = 32, 512, 100


@dataclass(frozen=True)
class Load:
    """Prompts for one model, and the tokens of each answer."""

    name: str
    folder: Path
    prompts: Sequence[list[int]]
    new_tokens: int


@dataclass(frozen=True)
class Round:
    """One round: tokens a second without and with proposals, and of the latter proposed and accepted tokens."""

    plain: float
    proposing: float
    drafted: float
    accepted: float
    foreign: float


class Pair:
    """Two loops over one model, without and with proposals."""

    def __init__(self, load: Load, precision: str) -> None:
        from shapeshift.fused_decode.model.cpu_runtime import DecodeModel

        model = DecodeModel.load(
            load.folder,
            precision=precision,
            slots=_SLOTS,
            max_length=_MAX_LENGTH,
            threads=cores(),
            cache_dir=BUILD / "kernels",
            log=progress,
        )
        self._table = token_bytes(load.folder / "tokenizer.json")
        self._new_tokens = load.new_tokens
        self.loops = [
            DecodeLoop(
                model,
                FirstComeFirstServed(_SLOTS, 1 << 20),
                lambda requests: None,
                progress,
                LoopOptions(speculator=one),
            )
            for one in (None, Speculator(PROPOSED, SHORTEST, LONGEST))
        ]

    def measure(self, prompts: Sequence[list[int]], first: int) -> Round:
        """The prompts at once on both loops, on loop `first` first. Raises ValueError for answers that differ."""
        metrics = self.loops[1].metrics
        before = metrics.draft_tokens.value, metrics.accepted_tokens.value
        with ForeignLoad() as foreign:
            runs = {place: self._run(self.loops[place], prompts) for place in (first, 1 - first)}
        if runs[0][1] != runs[1][1]:
            raise ValueError("the answers with proposals are not those without")
        drafted, accepted = metrics.draft_tokens.value - before[0], metrics.accepted_tokens.value - before[1]
        return Round(runs[0][0], runs[1][0], drafted, accepted, foreign.cores / cores())

    def _run(self, loop: DecodeLoop, prompts: Sequence[list[int]]) -> tuple[float, list[list[int]]]:
        params = SamplingParams(max_tokens=self._new_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            Request("", np.array(prompt, np.int64), params, TextStream(self._table), max_length=_MAX_LENGTH)
            for prompt in prompts
        ]
        start = time.perf_counter()
        for request in requests:
            loop.submit(request)
        while loop.step():
            pass
        rate = len(requests) * self._new_tokens / (time.perf_counter() - start)
        return rate, [request.token_ids for request in requests]


def main() -> int:
    """Measure, print, and write build/bench/fused_decode-speculation.*."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fused_decode.speculation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    parser.add_argument("--at-once", nargs="+", type=int, choices=COUNTS, default=list(COUNTS))
    options = parser.parse_args()
    # Before torch is imported.
    kernel_build.limit_spinning()
    settings = {
        "precision": options.precision,
        "rounds": options.rounds,
        "loads": ", ".join(options.loads),
        "seed": options.seed,
        "num_speculative_tokens": PROPOSED,
        "prompt_lookup": f"{SHORTEST} to {LONGEST}",
    }
    output = Output("fused_decode.speculation", settings, "fused_decode-speculation")
    output.say(_HEADING)
    cells = []
    for name in options.loads:
        load = LOADS[name](np.random.default_rng(options.seed))
        pair = Pair(load, options.precision)
        for count in options.at_once:
            rounds = []
            for number in range(options.rounds + 1):
                first = number * count % len(load.prompts)
                chosen = [load.prompts[(first + place) % len(load.prompts)] for place in range(count)]
                rounds.append(pair.measure(chosen, number % 2))
            # The first round is for learning the times.
            cells.append(cell(load, count, rounds[1:]))
            output.say(line(cells[-1]))
    output.data["cells"] = cells
    output.save()
    return 0


def copies(rng: np.random.Generator) -> Load:
    """The copying model, which is made if missing."""
    copier = copying.ensure(random_llama.ensure(FOLDER / "llama-110m"), FOLDER / "llama-110m-copying")
    return Load("copies", copier, copying.prompts(64, rng), copying.PERIOD - 8)


def docstrings(rng: np.random.Generator) -> Load:
    return Load("docstrings", DEMO, beginnings(64, rng), 200)


def random_words(rng: np.random.Generator) -> Load:
    """The random model, which is made if missing."""
    llama = random_llama.ensure(FOLDER / "llama-110m")
    words = rng.choice(np.array(random_llama.words(llama)), (64, PROMPT)).tolist()
    return Load("random", llama, words, copying.PERIOD - 8)


LOADS = {"copies": copies, "docstrings": docstrings, "random": random_words}


def beginnings(count: int, rng: np.random.Generator) -> list[list[int]]:
    """The beginnings of so many docstrings of the standard library, as tokens of the demo."""
    long = _long_docstrings()
    return [long[place] for place in rng.permutation(len(long))[:count]]


@cache
def _long_docstrings() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                found.append(text)
    return [ids[:_DOCSTRING] for text in found if len(ids := tokenizer.encode(text).ids) >= _DOCSTRING]


def cell(load: Load, count: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds."""
    drafted, accepted = sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)
    return {
        "load": load.name,
        "at_once": count,
        "plain": median([one.plain for one in rounds]),
        "proposing": median([one.proposing for one in rounds]),
        "ratio": median([one.proposing / one.plain for one in rounds]),
        "drafted": drafted / (len(rounds) * count * load.new_tokens),
        "accepted": accepted / max(drafted, 1.0),
        "foreign": median([one.foreign for one in rounds]),
    }


_HEADING = f"  {'':12}{'at once':>8}{'without':>9}{'with':>8}{'ratio':>7}{'proposed':>10}{'accepted':>10}{'foreign':>9}"


def line(found: dict[str, Any]) -> str:
    """One cell as a line of the table. proposed: verified tokens for each token of an answer."""
    rates = f"{found['plain']:>9.0f}{found['proposing']:>8.0f}{found['ratio']:>7.2f}"
    shares = f"{found['drafted']:>10.2f}{found['accepted']:>10.2f}{found['foreign']:>9.2f}"
    return f"  {found['load']:12}{found['at_once']:>8}{rates}{shares}"


if __name__ == "__main__":
    sys.exit(main())
