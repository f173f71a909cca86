"""The panel of polymorph: which lengths arrive, which engines they run on, and how little is padded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shapeshift.live.source import HISTORY_S, LAST_RATE, View
from shapeshift.live.svg import WIDTH, Plot, number, percent, plots, table, tile, tiles

NAME = "encode"
TECHNIQUE = "polymorph"
TITLE = "Texts of any length"
IDEA = (
    "Texts differ in length. Instead of padding each one to the longest, the server has an engine for many lengths, and"
    " puts short texts side by side into one call. Watch: the bars are nearly all text, hardly any padding."
)
_CALLS = 14
_LONGEST_AXIS = 64
_BINS = ("text-a", "many", "engine", "lent")
"""Colours of bins, the shortest first."""


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    page = view.page
    runs_engines = {*page.models_with("engine_rows_total"), *page.models_with("worker_rows_total")}
    cascades = page.models_with("level_texts_total")
    fronts = page.models_with("requests_total")
    return view.busiest(model for model in fronts if model in runs_engines and model not in cascades)


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    packs = packs_of(view, model, 10.0)
    return (
        _numbers(view, model, packs)
        + _workers(view, model)
        + plots(_lengths(view, model), _calls(packs), _work(view, model, packs), _threads(view, model, packs))
    )


class Pack(NamedTuple):
    """An engine call. model, thread: who made it; size: tokens that were computed, of which `tokens` are of texts.

    lengths: of its texts, empty where they are too many for a record.
    """

    model: str
    thread: str
    at: float
    size: int
    tokens: int
    texts: int
    lengths: Sequence[int]
    ms: float


def packs_of(view: View, model: str, seconds: float) -> list[Pack]:
    """The engine calls of the last seconds, of this process and of its workers."""
    workers = [worker["name"] for worker in view.status.get("workers", ()) if worker["front"] == model]
    packs = [pack for name in (model, *workers) for pack in calls_of(view, name, seconds)]
    return sorted(packs, key=lambda pack: pack.at)


def calls_of(view: View, name: str, seconds: float) -> list[Pack]:
    """Those of one process."""
    packs = []
    for event in view.recent(name, "pack", seconds):
        values, texts = event.values, event.values["texts"]
        lengths = texts if isinstance(texts, list) else []
        count = len(lengths) or texts
        packs.append(
            Pack(name, values["thread"], event.at, values["size"], values["tokens"], count, lengths, values["ms"])
        )
    return packs


def padding(packs: Sequence[Pack]) -> tuple[int, int, int]:
    """Tokens of the texts, tokens that were computed for them, and texts."""
    return sum(pack.tokens for pack in packs), sum(pack.size for pack in packs), sum(pack.texts for pack in packs)


def _numbers(view: View, model: str, packs: Sequence[Pack]) -> str:
    change = view.change
    tokens, computed, texts = padding(packs)
    longest = max(_length_bounds(view, model), default=0)
    calls = len(packs)
    alone = (
        f"padded to {longest:.0f} each it would be {percent(1 - tokens / (texts * longest))}"
        if texts and longest
        else ""
    )
    return tiles(
        tile("texts a second", number(change.rate(model, "request_tokens_count")), LAST_RATE),
        tile(
            "padding computed",
            percent(1 - tokens / computed) if computed else "–",
            f"{LAST_RATE}; {alone}" if alone else LAST_RATE,
            "good" if computed and tokens > computed / 2 else "",
        ),
        tile("texts in a call", number(texts / calls if calls else None), f"mean of the {LAST_RATE}"),
        tile(
            "98% answered within",
            number(change.quantile(model, "request_latency_ms", 0.98), "ms"),
            f"{LAST_RATE}, waiting counts; half within"
            f" {number(change.quantile(model, 'request_latency_ms', 0.5), 'ms')}",
        ),
        tile("waiting now", number(view.page.total(model, "requests_waiting"))),
    )


def _length_bounds(view: View, model: str) -> list[float]:
    return sorted(bound for bound in view.minute.histogram(model, "request_tokens") if math.isfinite(bound))


def _engine_sizes(view: View, model: str) -> list[int]:
    names = view.page.by(model, "engine_used_total", "engine")
    for worker in view.status.get("workers", ()):
        if worker["front"] == model and worker["bin"]:
            names[str(worker["bin"])] = 0.0
    return sorted(int(name) for name in names if name.isdecimal())


def _lengths(view: View, model: str) -> Plot:
    plot = Plot(
        190,
        "Lengths of the texts that arrive",
        f"{view.minute_words}; a bar: how many texts; marks below: lengths that have an engine",
    )
    counts = view.minute.histogram(model, "request_tokens")
    longest = max([bound for bound, count in counts.items() if count and math.isfinite(bound)], default=0.0)
    sizes = _engine_sizes(view, model)
    if not longest:
        plot.empty("no text in the last minute")
        return plot
    axis = max(longest, _LONGEST_AXIS)
    top, bottom, most = 10.0, 150.0, max(counts.values())
    below = 0.0
    for bound in sorted(bound for bound in counts if bound <= axis):
        height = (bottom - top) * counts[bound] / most
        tip = f"{below + 1:.0f} to {bound:.0f} tokens: {counts[bound]:.0f} texts"
        if counts[bound]:
            plot.rect(
                WIDTH * below / axis + 0.5, bottom - height, WIDTH * (bound - below) / axis - 1, height, "text-a", tip
            )
        below = bound
    plot.line(0, bottom, WIDTH, bottom)
    for size in sizes:
        if size <= axis:
            plot.rect(WIDTH * size / axis - 1.5, bottom + 2, 3, 10, "engine", f"engine of {size} tokens")
    for share in (0.0, 0.5, 1.0):
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        plot.text(WIDTH * share, bottom + 28, f"{axis * share:.0f}{' tokens' if share == 1 else ''}", "tick", anchor)
    plot.legend(("text-a", "texts"), ("engine", "an engine of this length"))
    common = max(counts, key=lambda bound: counts[bound])
    plot.description = (
        f"{sum(counts.values()):.0f} texts in the {view.minute_words}, most of them up to {common:.0f} tokens long,"
        f" the longest up to {longest:.0f}. Engines: {', '.join(map(str, sizes)) or 'one for any length'}."
    )
    return plot


def _calls(packs: Sequence[Pack]) -> Plot:
    shown = packs[-_CALLS:]
    row = 14.0
    plot = Plot(
        20 + row * _CALLS,
        "The last engine calls",
        "a line is a call, a box is a text; at the right: tokens of text of all computed, time in the engine",
    )
    if not shown:
        plot.empty("no call in the last seconds")
        return plot
    room = WIDTH - 205
    axis = max(max(pack.size for pack in shown), _LONGEST_AXIS)
    for place, pack in enumerate(reversed(shown)):
        size, y, start = pack.size, 6 + place * row, 0
        for index, length in enumerate(pack.lengths or [pack.tokens]):
            kind = "text-a" if index % 2 == 0 else "text-b"
            tip = f"a text of {length} tokens" if pack.lengths else f"{pack.texts} texts of {length} tokens in all"
            plot.rect(room * start / axis, y, room * length / axis - 0.8, row - 3, kind, tip)
            start += length
        if size > start:
            plot.rect(
                room * start / axis, y, room * (size - start) / axis, row - 3, "padding", f"{size - start} padded"
            )
        words = f"{pack.texts} text{'s' if pack.texts > 1 else ''}, {start} of {size}"
        plot.text(WIDTH, y + row - 5, f"{words} · {pack.ms:.1f} ms", "tick", "end")
    plot.legend(
        ("text-a", "a text"), ("text-b", "the next text of the call"), ("padding", "padding: computed for nothing")
    )
    tokens, computed, texts = padding(shown)
    plot.description = f"The last {len(shown)} calls computed {texts} texts: {tokens} of {computed} tokens are text."
    return plot


def _work(view: View, model: str, packs: Sequence[Pack]) -> Plot:
    plot = Plot(112, "Tokens computed, last 10 seconds", "here, and if each text were padded to the longest length")
    tokens, computed, texts = padding(packs)
    longest = max(_length_bounds(view, model), default=0)
    if not texts or not longest:
        plot.empty("no call in the last seconds")
        return plot
    padded = max(texts * longest, computed)
    room = WIDTH - 60
    for place, (words, size) in enumerate((("here", computed), (f"padded to {longest:.0f}", padded))):
        y = 16 + place * 48
        plot.text(0, y - 4, words, "label")
        plot.rect(0, y, room * tokens / padded, 26, "text-a", f"{tokens} tokens of texts")
        plot.rect(
            room * tokens / padded, y, room * (size - tokens) / padded, 26, "padding", f"{size - tokens:.0f} padded"
        )
        plot.text(room * size / padded + 6, y + 18, number(size), "tick")
    plot.legend(("text-a", "texts"), ("padding", "padding"))
    plot.description = (
        f"{computed} tokens were computed for {tokens} of text; padded to {longest:.0f} it were {padded:.0f}."
    )
    return plot


def _threads(view: View, model: str, packs: Sequence[Pack]) -> Plot:
    # Each process has threads of the same names.
    lanes: dict[str, list[Pack]] = defaultdict(list)
    for pack in packs:
        if pack.thread != "loader":
            lanes[_lane(pack, model)].append(pack)
    seconds, row = 2.0, 26.0
    plot = Plot(
        24 + row * max(len(lanes), 1),
        "What each engine thread did",
        f"last {seconds:g} seconds; a box is a call; the share: busy in the {LAST_RATE}",
    )
    if not lanes:
        plot.empty("no call in the last seconds")
        return plot
    left = 96
    room = WIDTH - left
    for place, (name, calls) in enumerate(sorted(lanes.items())):
        y = 4 + place * row
        plot.text(0, y + 15, f"{name}: {_busy(calls)}", "label")
        for call in calls:
            start = call.at - call.ms / 1e3 - (view.now - seconds)
            if start >= 0:
                kind = "many" if call.texts > 1 else "one"
                tip = f"{call.texts} texts, {call.tokens} tokens, {call.ms} ms"
                plot.rect(left + room * start / seconds, y, room * call.ms / 1e3 / seconds, row - 8, kind, tip)
    plot.line(left, 4 + row * len(lanes), WIDTH, 4 + row * len(lanes))
    plot.legend(("one", "one text"), ("many", "several texts in one call"))
    plot.description = "; ".join(
        f"{name} computed {_busy(calls)} of the last 10 s" for name, calls in sorted(lanes.items())
    )
    return plot


def _lane(pack: Pack, front: str) -> str:
    thread = pack.thread.removeprefix("engine-")
    return f"thread {thread}" if pack.model == front else f"{pack.model.removeprefix(f'{front}_')} {thread}"


def _busy(calls: Sequence[Pack]) -> str:
    return percent(min(sum(call.ms for call in calls) / 1e4, 1.0))


def _workers(view: View, model: str) -> str:
    workers = [one for one in view.status.get("workers", ()) if one["front"] == model]
    if not workers:
        return ""
    rows = [(one["name"], one["bin"] or "any", one["state"], one["outstanding"], one["generation"]) for one in workers]
    head = ("worker", "bin", "state", "waiting", "times moved")
    return plots(_moves(view, model, sorted(one["name"] for one in workers))) + table(
        "Workers and the length that each holds", head, rows, ""
    )


def _moves(view: View, model: str, workers: Sequence[str]) -> Plot:
    """What came, and what each worker held: the sidecar's moves follow the texts."""
    top, bottom, row, left = 8.0, 108.0, 24.0, 44.0
    plot = Plot(
        bottom + 22 + row * len(workers),
        "Texts that came, and the bins of the workers",
        f"last {HISTORY_S:.0f} seconds; above: a dot is a text, higher is longer; below: the bin that each worker held",
    )
    calls = [call for call in packs_of(view, model, HISTORY_S) if call.thread != "loader"]
    if not calls:
        plot.empty("no call in the last minute")
        return plot
    sizes = sorted({call.size for call in calls})
    room, start, longest = WIDTH - left, view.now - HISTORY_S, sizes[-1]
    for call in calls:
        for length in call.lengths:
            x, y = left + room * (call.at - start) / HISTORY_S, bottom - (bottom - top) * length / longest
            plot.rect(x - 1, y - 1, 2, 2, "text-a")
    for share in (0.0, 1.0):
        plot.text(left - 6, bottom - (bottom - top - 8) * share, f"{longest * share:.0f}", "tick", "end")
    plot.line(left, bottom, WIDTH, bottom)
    held = []
    for place, worker in enumerate(workers):
        y, runs = bottom + 8 + place * row, runs_of([call for call in calls if call.model == worker])
        plot.text(left - 6, y + 14, worker.removeprefix(f"{model}_"), "label", "end")
        for size, begin, end in runs:
            x, kind = left + room * max(begin - start, 0.0) / HISTORY_S, _BINS[sizes.index(size) % len(_BINS)]
            width = room * (end - max(begin, start)) / HISTORY_S
            plot.rect(x, y, width, row - 6, kind, f"{worker}: bin of {size} tokens for {end - begin:.0f} s")
            if width > 9 * len(str(size)):
                plot.text(x + 3, y + 14, size, "inside")
        if runs:
            held.append(f"{worker} {', then '.join(str(size) for size, _, _ in runs)}")
    plot.description = f"Bins of the workers: {'; '.join(held)}. Texts: {sum(call.texts for call in calls)}."
    return plot


def runs_of(calls: Sequence[Pack]) -> list[tuple[int, float, float]]:
    """The bins of one worker by its calls, in order: size, begin of its first call, end of its last one."""
    runs: list[tuple[int, float, float]] = []
    for call in calls:
        if runs and runs[-1][0] == call.size:
            runs[-1] = (call.size, runs[-1][1], call.at)
        else:
            runs.append((call.size, call.at - call.ms / 1e3, call.at))
    return runs
