"""Draws docs/workers.svg from the demo's JSON: `python -m bench.demo.plot [--result build/bench/demo.json --to FILE]`.

The same texts, which grow longer, over four workers: with the first plan frozen, and with the sidecar at work.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.output import program

RESULT, PLOT = Path("bench/results/demo.json"), Path("docs/workers.svg")
# Legible on white and on black. Of bins, the shortest first.
_BINS = ("#7fb2e5", "#3b82c4", "#c98a2b", "#8a5fb0")
_GOOD, _BAD, _TEXT, _DOT = "#3b82c4", "#c23b2c", "#7a828e", "#9aa2ad"
_LEFT, _WIDTH, _GAP = 66, 330, 24
_TOP, _LENGTHS, _ROW, _WAITS = 38, 84, 15, 104
# Seconds of an answer, on a scale of powers of ten.
_LEAST_S, _MOST_S = 0.02, 30.0

Side = Mapping[str, Any]


def draw(sides: Mapping[str, Side], file: Path) -> None:
    """Write the plot of the turns of `sides`, by what they are called: see `workers.played`."""
    seconds = max(text[0] for side in sides.values() for text in side["texts"])
    longest = max(text[1] for side in sides.values() for text in side["texts"])
    rows = max(len(side["bins"]) for side in sides.values())
    bins_at = _TOP + _LENGTHS + 22
    waits_at = bins_at + rows * _ROW + 22
    parts = [_text(_LEFT - 8, y, words, "end") for y, words in _labels(longest, bins_at, waits_at, rows)]
    sizes = sorted({run[0] for side in sides.values() for runs in side["bins"].values() for run in runs})
    for place, (title, side) in enumerate(sides.items()):
        left = _LEFT + place * (_WIDTH + _GAP)
        parts += _side(title, side, left, _WIDTH / seconds, longest, sizes, bins_at, waits_at)
        for at in range(0, int(seconds) + 1, 10):
            words = f"{at} s" if at else "0"
            parts.append(_text(left + at * _WIDTH / seconds, waits_at + _WAITS + 15, words, "middle"))
    width, height = _LEFT + 2 * _WIDTH + _GAP + 12, waits_at + _WAITS + 22
    captions = ("words of each text", "bin of each worker (tokens), while it had texts", "time to the answer")
    for y, words in zip((_TOP, bins_at, waits_at), captions, strict=True):
        parts.append(_text(_LEFT, y - 4, words, size=10))
    title = "Four workers while texts grow longer: with the first plan frozen, and moved by the sidecar"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" font-family="sans-serif">'
    file.write_text("\n".join([head, f"<title>{title}</title>", *parts, "</svg>\n"]), encoding="utf-8")


def _labels(longest: float, bins_at: float, waits_at: float, rows: int) -> Iterator[tuple[float, str]]:
    yield _TOP + 8, f"{longest:.0f} words"
    yield _TOP + _LENGTHS, "0"
    for row in range(rows):
        yield bins_at + row * _ROW + 11, f"worker {row + 1}"
    for answer_s in (0.1, 1.0, 10.0):
        yield waits_at + _wait(answer_s) + 4, f"{answer_s:g} s"


def _side(
    title: str,
    side: Side,
    left: float,
    step: float,
    longest: float,
    sizes: Sequence[int],
    bins_at: float,
    waits_at: float,
) -> Iterator[str]:
    texts = side["texts"]
    answered = [text for text in texts if text[2] is not None]
    mean = fmean(text[2] for text in answered) if answered else math.nan
    facts = f"{len(texts) - len(answered)} of {len(texts)} fail, mean {mean:.2f} s"
    yield _text(left, 14, f"{title}: {facts}", size=13)
    yield _dots(((left + at * step, _TOP + _LENGTHS * (1 - words / longest)) for at, words, _ in texts), _DOT)
    for row, runs in enumerate(side["bins"].values()):
        y = bins_at + row * _ROW
        for size, begin, end in runs:
            x, width = left + max(begin, 0) * step, (min(end, texts[-1][0]) - max(begin, 0)) * step
            if width <= 0:
                continue
            colour = _BINS[sizes.index(size) % len(_BINS)]
            yield f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{_ROW - 2}" fill="{colour}"/>'
            if width > 24:
                yield _text(x + 3, y + 10.5, str(size), size=10, fill="#fff")
    yield _dots(((left + at * step, waits_at + _wait(answer_s)) for at, _, answer_s in answered), _GOOD)
    lost = [(left + at * step, waits_at + _wait(_MOST_S)) for at, _, answer_s in texts if answer_s is None]
    if lost:
        yield _dots(lost, _BAD)
        yield _text(lost[0][0], waits_at + _wait(_MOST_S) + 15, "no answer", size=11, fill=_BAD)


def _wait(answer_s: float) -> float:
    share = math.log(max(answer_s, _LEAST_S) / _LEAST_S) / math.log(_MOST_S / _LEAST_S)
    return _WAITS * (1 - min(share, 1.0))


def _dots(places: Any, colour: str) -> str:
    path = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in places)
    return f'<path d="{path}" stroke="{colour}" stroke-width="2" stroke-linecap="round"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 11, fill: str = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


@program
def main() -> int:
    """Draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--result", type=Path, default=RESULT, help="what the demo wrote (%(default)s)")
    parser.add_argument("--to", type=Path, default=PLOT, help="the plot (%(default)s)")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text(encoding="utf-8"))["workers"], options.to)
    print(f"written: {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
