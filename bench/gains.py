"""Draws docs/gains.svg from the results in bench/results: `python -m bench.gains [--results build/bench --to FILE]`.

One bar a technique: how many times better it is than what its user would take instead, in one run of its benchmark.
bench/results holds the JSON of these runs as the benchmarks wrote it, with command, seed, hardware and date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.output import program
from shapeshift.errors import NotFoundError

RESULTS = Path(__file__).parent / "results"
PLOT = Path("docs/gains.svg")
# Legible on white and on black.
_BAR, _TEXT, _LINE = "#3b82c4", "#7a828e", "#9aa2ad"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Gain:
    """One bar. ratio: above 1 the technique is better; benchmark: whose result it is; other: a second comparison."""

    technique: str
    what: str
    over: str
    ratio: float
    benchmark: str
    result: Result
    other: str = ""

    @property
    def label(self) -> str:
        """The ratio, as the plot shows it."""
        return f"{self.ratio:.2f}x"

    @property
    def machine(self) -> str:
        """The hardware of the run."""
        hardware = self.result["hardware"]
        return f"{hardware['cpu']}, {hardware['cores']} cores"

    @property
    def source(self) -> str:
        """Command, hardware and date of the run."""
        return f"{self.result['settings']['command']}: {self.machine}, {self.result['date']}"


def read(folder: Path = RESULTS) -> list[Gain]:
    """The gains of the results in `folder`. Raises NotFoundError for a benchmark that has none there."""
    return [gain(folder) for gain in (_polymorph, _token_adapt, _fused_decode, _adapter_cache, _cascade)]


def _polymorph(folder: Path) -> Gain:
    result = _result(folder, "encode")
    spent = {cell["system"]: cell["processor_ms"] for cell in result["cells"] if cell["load"] == "closed 8"}
    one, padded = (spent[system] / spent["engine set"] for system in ("DT", "ST"))
    what, other = "processor time of a short text, 8 in flight", f"over one padded to 512 tokens: {padded:.1f}x"
    return Gain("polymorph", what, "one engine for any length", one, "encode", result, other)


def _token_adapt(folder: Path) -> Gain:
    result = _result(folder, "token_adapt")
    rows = [row for row in result["ratios"] if row["what"].startswith("emulated") and row["load"].startswith("1.2")]
    plain = next(row["ratio"] for row in rows if row["over"].startswith("gamma 0"))
    best = next(row["ratio"] for row in rows if row["over"].endswith("best fixed one"))
    what, over = "utility of images with deadlines at 1.2 times capacity", "the plain model"
    return Gain(
        "token_adapt", what, over, plain, "token_adapt", result, f"over the best fixed number of tokens: {best:.2f}x"
    )


def _fused_decode(folder: Path) -> Gain:
    result = _result(folder, "fused_decode")
    rates = {row["over"]: row["tokens/s"] for row in result["ratios"] if row["load"] == "8 at once"}
    what, over = "tokens a second of a 110M Llama in f32, 8 at once", "transformers' continuous batching"
    other = f"over its static batch: {rates['static batch']:.1f}x"
    return Gain("fused_decode", what, over, rates["continuous batching"], "fused_decode", result, other)


def _adapter_cache(folder: Path) -> Gain:
    result = _result(folder, "adapter_cache")
    (load,) = (name for name in result if name.startswith("load "))
    plain, ours = (result[load][system] for system in ("fifo, no cache", "arrival, cache (default)"))
    p99, p50 = (plain[name] / ours[name] for name in ("first_p99_ms", "first_p50_ms"))
    what = f"p99 of the first token, 100 adapters at {load.removeprefix('load ')} of capacity"
    return Gain(
        "adapter_cache",
        what,
        "first come, first served without a cache",
        p99,
        "adapter_cache",
        result,
        f"p50: {p50:.2f}x",
    )


def _cascade(folder: Path) -> Gain:
    result = _result(folder, "cascade")
    large, ours = (
        next(row for row in result["tables"]["clinc150"] if row["system"] == name) for name in ("always large", "ours")
    )
    points = 100 * (ours["accuracy"] - large["accuracy"])
    gain = large["mean_ms"] / ours["mean_ms"]
    what, other = "mean time to classify a text", f"accuracy: {points:+.1f} points"
    return Gain("cascade", what, "always the large model", gain, "cascade", result, other)


def _result(folder: Path, benchmark: str) -> Result:
    file = folder / f"{benchmark}.json"
    if not file.is_file():
        raise NotFoundError(f"no {file}: run `make bench BENCH={benchmark}`")
    result: Result = json.loads(file.read_text(encoding="utf-8"))
    return result


def draw(gains: Sequence[Gain], file: Path) -> None:
    """Write the plot; the same gains give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "gains", "font.family": "sans-serif", "font.size": 10}
    with matplotlib.rc_context({**style, "text.color": _TEXT}):
        sheet, panel = pyplot.subplots(figsize=(8.6, 0.62 * len(gains) + 0.6))
        for place, gain in enumerate(gains):
            row = len(gains) - place
            panel.barh(row, gain.ratio, height=0.42, color=_BAR)
            panel.vlines(1.0, row - 0.3, row + 0.22, color=_LINE, linestyles=":", linewidth=1)
            panel.text(gain.ratio + 0.03, row, gain.label, va="center", weight="bold", gid=f"gain-{gain.technique}")
            panel.text(0.0, row + 0.36, f"{gain.technique}: {gain.what}, over {gain.over}", va="center", size=9)
            panel.text(gain.ratio + 0.42, row, f"({gain.other})", va="center", size=8)
        machines = sorted({f"{gain.machine}, {gain.result['date']}" for gain in gains if gain.result})
        note = f"dotted: 1x, what a user would take instead. One run each: {'; '.join(machines)}"
        panel.text(0.0, 0.45, note, va="center", size=8)
        panel.set(xlim=(0, max(gain.ratio for gain in gains) + 1.6), ylim=(0.3, len(gains) + 0.75))
        panel.axis("off")
        sheet.tight_layout(pad=0.2)
        sheet.savefig(file, transparent=True, metadata={"Date": None, "Title": "What each technique gains"})
        pyplot.close(sheet)


def lines(gains: Sequence[Gain]) -> Iterator[str]:
    """A line for each bar: what was compared, and where and when."""
    for gain in gains:
        yield f"{gain.technique}: {gain.label} over {gain.over} ({gain.other}); {gain.source}"


@program
def main() -> int:
    """Draw the plot, and print its figures with their sources."""
    parser = argparse.ArgumentParser(prog="python -m bench.gains", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the benchmarks' JSON (%(default)s)")
    parser.add_argument("--to", type=Path, default=PLOT, help="the plot (%(default)s)")
    options = parser.parse_args()
    gains = read(options.results)
    draw(gains, options.to)
    print("\n".join([*lines(gains), f"written: {options.to}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
