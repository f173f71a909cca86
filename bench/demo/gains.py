"""What each technique gained over its baseline: of turns of one and the other under the same load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from bench.common.output import Row
from bench.demo.load import Answer, Request
from shapeshift.live import encode
from shapeshift.live.source import View

ESTIMATE = " (estimate)"


@dataclass(frozen=True)
class Turn:
    """What the server and the load say of one turn. model: who answered the front that the turn is about.

    seconds: how long requests were sent; view: its events and counters are of the whole turn. began: on the clock of
    its events; requests: those that were answered so.
    """

    model: str
    seconds: float
    view: View
    answers: Sequence[Answer]
    began: float = 0.0
    requests: Sequence[Request] = ()

    def total(self, metric: str) -> float:
        """The growth of a counter of `model`."""
        return self.view.change.total(self.model, metric)


Turns = Sequence[Turn]
Measure = tuple[str, Callable[[Turns], float], bool]
"""In words, of the turns of one side, and whether more is better."""


def _ratio(over: str, under: str, factor: float = 1.0) -> Callable[[Turns], float]:
    """A counter a unit of another one."""

    def measure(turns: Turns) -> float:
        count = sum(turn.total(under) for turn in turns)
        return factor * sum(turn.total(over) for turn in turns) / count if count else 0.0

    return measure


def _mean_ms(turns: Turns) -> float:
    answered = [answer.seconds for turn in turns for answer in turn.answers if isfinite(answer.seconds)]
    return 1e3 * fmean(answered) if answered else 0.0


def _answered(turns: Turns) -> float:
    answers = [answer for turn in turns for answer in turn.answers]
    return 100 * sum(isfinite(answer.seconds) for answer in answers) / len(answers) if answers else 0.0


def _utility(turns: Turns) -> float:
    return sum(turn.total("utility_total") for turn in turns) / sum(turn.seconds for turn in turns)


MEASURES: Mapping[str, Sequence[Measure]] = {
    "encode": [
        ("engine time of a text, ms", _ratio("engine_seconds_total", "engine_rows_total", 1e3), False),
        ("mean time of a text, ms", _mean_ms, False),
    ],
    "encode_workers": [
        ("texts answered in time, %", _answered, True),
        ("mean time of these texts, ms", _mean_ms, False),
    ],
    "classify_image": [("utility a second", _utility, True)],
    "generate": [
        ("texts advanced by a step", _ratio("generated_tokens_total", "iteration_ms_count"), True),
        ("mean time to the last token, ms", _mean_ms, False),
    ],
    "generate_lora": [
        ("loads in 100 requests", _ratio("adapter_load_ms_count", "adapter_requests_total", 100), False),
        ("mean time to the last token, ms", _mean_ms, False),
    ],
    "classify_text": [("mean time of a text, ms", _mean_ms, False)],
}


def rows(front: str, ours: Turns, baseline: Turns, over: str) -> list[Row]:
    """The rows of a front; `times` above 1: ours is better. over: the baseline in words."""
    result = [
        _row(front, words, measure(ours), measure(baseline), more, over) for words, measure, more in MEASURES[front]
    ]
    estimate = _padding(ours) if front == "encode" else None
    return [*result, estimate] if estimate else result


def _row(front: str, words: str, here: float, there: float, more: bool, over: str) -> Row:
    better, worse = (here, there) if more else (there, here)
    times = f"{better / worse:.2f}" if worse else "-"
    return {"front": front, "measure": words, "ours": here, "baseline": there, "times": times, "over": over}


def _padding(turns: Turns) -> Row | None:
    computed = padded = 0
    for turn in turns:
        packs = encode.packs_of(turn.view, turn.model, turn.view.change.seconds)
        lengths = [length for pack in packs for length in pack.lengths]
        computed += encode.padding(packs)[1]
        padded += len(lengths) * max(lengths, default=0)
    words, over = f"tokens computed{ESTIMATE}", "each padded to the longest of the turn"
    return _row("encode", words, computed, padded, False, over) if computed else None
