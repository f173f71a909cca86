"""The panel of adapter_cache: which adapters are in memory, and what that spares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.live import generate
from shapeshift.live.source import LAST_RATE, View
from shapeshift.live.svg import WIDTH, Plot, compare, number, percent, plots, tile, tiles

NAME = "lora"
TECHNIQUE = "adapter_cache"
TITLE = "Many adapters over one model"
IDEA = (
    "Each request may name its own LoRA adapter. The popular ones stay in memory that texts do not need just now, and"
    " leave when texts need it; small requests do not wait behind large ones. Watch: most requests find their adapter"
    " in memory, and adapters come and go with what is asked for."
)
_MOST_NAMED = 12


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    return view.busiest(view.page.models_with("adapters_known"))


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    queues = [_queues(view, model)] if view.page.series(model, "adapter_queue_requests") else []
    return _numbers(view, model) + plots(
        _area(view, model),
        _asked(view, model),
        _loaded(view, model),
        _moves(view, model),
        *queues,
        generate.slots(view, model),
    )


@dataclass
class Resident:
    """An adapter in memory. blocks: of the texts' memory that it has borrowed."""

    name: str
    bytes: float
    uses: int = 0
    users: int = 0
    blocks: int = 0


def residents(view: View, model: str) -> dict[str, Resident]:
    """The adapters in memory by name, as far as the ring says."""
    present: dict[str, Resident] = {}
    for event in view.events.get(model, ()):
        values = event.values
        if event.kind == "residents":
            present |= {name: Resident(name, *counts) for name, *counts in values["rows"]}
        elif event.kind == "load":
            present[values["adapter"]] = Resident(values["adapter"], values["bytes"])
        elif event.kind == "evict":
            present.pop(values["adapter"], None)
    return present


def _numbers(view: View, model: str) -> str:
    page, minute = view.page, view.minute
    hits, misses = minute.total(model, "adapter_hits_total"), minute.total(model, "adapter_misses_total")
    return tiles(
        tile(
            "found their adapter in memory",
            percent(hits / (hits + misses) if hits + misses else None),
            f"{hits:.0f} of {hits + misses:.0f} in the {view.minute_words}",
            "good" if hits > misses else "",
        ),
        tile(
            "adapters in memory now",
            f"{page.total(model, 'adapters_resident'):.0f} of {page.total(model, 'adapters_known'):.0f}",
            f"{_mib(page.total(model, 'adapter_vacant_bytes'))} free of what is theirs alone",
        ),
        tile(
            "half of the loads within", number(minute.quantile(model, "adapter_load_ms", 0.5), "ms"), view.minute_words
        ),
        tile(
            "98% of first tokens within", number(view.change.quantile(model, "first_token_ms", 0.98), "ms"), LAST_RATE
        ),
    )


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _area(view: View, model: str) -> Plot:
    plot = Plot(190, "Adapters in memory now", "the area is their size; darker: a request uses it")
    there = sorted(residents(view, model).values(), key=lambda one: (-one.bytes, one.name))
    if not there:
        plot.empty("none seen in the last minute")
        return plot
    total = sum(one.bytes for one in there)
    height = 182.0
    rows = max(1, round(math.sqrt(len(there) * height / WIDTH)))
    y, left = 0.0, list(there)
    for row in range(rows):
        line, share = left[: math.ceil(len(left) / (rows - row))], 0.0
        left = left[len(line) :]
        share = sum(one.bytes for one in line)
        thick, x = height * share / total, 0.0
        for one in line:
            wide = WIDTH * one.bytes / share
            kind = "decode" if one.users else ("lent" if one.blocks else "kept")
            tip = f"{one.name}: {_mib(one.bytes)}, used {one.uses} times, {one.users} requests now"
            plot.rect(x, y, wide - 2, thick - 2, kind, tip, 3)
            if wide > 12 * 4:
                plot.text(x + 5, y + 15, _short(one.name, wide), "ink")
            x += wide
        y += thick
    plot.legend(
        ("decode", "used now"), ("kept", "kept, in memory for adapters"), ("lent", "kept, in memory that texts lent")
    )
    plot.description = f"{len(there)} adapters, {_mib(total)}: {', '.join(one.name for one in there[:20])}"
    return plot


def _short(name: str, wide: float) -> str:
    most = int(wide / 7)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _asked(view: View, model: str) -> Plot:
    counts = sorted(view.minute.by(model, "adapter_requests_total", "adapter").items(), key=lambda one: -one[1])
    shown = [(name, count) for name, count in counts if count][:_MOST_NAMED]
    row = 15.0
    plot = Plot(
        12 + row * max(len(shown), 6),
        f"What was asked for, {view.minute_words}",
        "requests by adapter, the most popular",
    )
    there = residents(view, model)
    if not shown:
        plot.empty("no request named an adapter")
        return plot
    left, most = 130.0, shown[0][1]
    for place, (name, count) in enumerate(shown):
        y = 4 + place * row
        plot.text(left - 6, y + row - 5, _short(name, left - 10), "label", "end")
        kind = "many" if name in there else "padding"
        plot.rect(left, y, (WIDTH - left - 40) * count / most, row - 4, kind, f"{name}: {count:.0f} requests")
        plot.text(left + (WIDTH - left - 40) * count / most + 5, y + row - 5, f"{count:.0f}", "tick")
    plot.legend(("many", "in memory now"), ("padding", "not in memory"))
    plot.description = ", ".join(f"{name}: {count:.0f}" for name, count in shown)
    return plot


def sizes(view: View, model: str) -> dict[str, float]:
    """Bytes of the adapters that were in memory in the last minute."""
    events = view.events.get(model, ())
    loaded = {one.values["adapter"]: one.values["bytes"] for one in events if one.kind == "load"}
    return loaded | {name: size for one in events if one.kind == "residents" for name, size, *_ in one.values["rows"]}


def _loaded(view: View, model: str) -> Plot:
    plot = Plot(90, f"Adapters loaded, {view.minute_words}", "here, and if each request loaded its adapter")
    bytes_of = sizes(view, model)
    counts = view.minute.by(model, "adapter_requests_total", "adapter")
    # Of an adapter that could not be loaded the size is unknown.
    alone = sum(count * bytes_of.get(name, 0) for name, count in counts.items())
    if not alone:
        plot.empty("no request named an adapter")
        return plot
    here = view.minute.total(model, "adapter_loaded_bytes_total")
    rows = (("here", here / (1 << 20), "many"), ("for each request", alone / (1 << 20), "fixed"))
    compare(plot, rows, "MiB")
    return plot


def _moves(view: View, model: str) -> Plot:
    plot = Plot(120, "Loads and evictions", f"{view.minute_words}, now at the right; the height is the size")
    loads, evicted = view.recent(model, "load", view.minute_s), view.recent(model, "evict", view.minute_s)
    plot.line(0, 58, WIDTH, 58)
    for moves, base, up, kind in ((loads, 54.0, -1, "load"), (evicted, 62.0, 1, "evict")):
        largest = max((event.values["bytes"] for event in moves), default=1)
        for event in moves:
            height = 10 + 34 * event.values["bytes"] / largest
            x = WIDTH * (1 - (view.now - event.at) / view.minute_s)
            reason = f", {event.values['ms']} ms" if kind == "load" else f", for {event.values['why']}"
            tip = f"{event.values['adapter']}, {_mib(event.values['bytes'])}{reason}"
            plot.rect(x - 2, base - height if up < 0 else base, 4, height, kind, tip)
    plot.text(0, 14, f"{len(loads)} loaded", "label")
    plot.text(0, 112, f"{len(evicted)} evicted", "label")
    plot.legend(("load", "loaded"), ("evict", "evicted: for another adapter, or for a text"))
    reasons = Counter(event.values["why"] for event in evicted)
    plot.description = f"{len(loads)} loads and {len(evicted)} evictions; evicted by reason: " + (
        ", ".join(f"{why} {count}" for why, count in reasons.items()) or "none"
    )
    return plot


def _queues(view: View, model: str) -> Plot:
    waiting = view.page.by(model, "adapter_queue_requests", "queue")
    quotas = view.page.by(model, "adapter_queue_quota_tokens", "queue")
    row = 26.0
    names: Sequence[str] = sorted(waiting, key=lambda name: (len(name), name))
    plot = Plot(12 + row * max(len(names), 2), "Waiting requests, by size", "each size has its own queue and quota")
    most = max([*waiting.values(), 8.0])
    for place, name in enumerate(names):
        y = 4 + place * row
        count = waiting[name]
        size = "smallest" if place == 0 else "largest" if place == len(names) - 1 else f"size {name}"
        plot.text(0, y + 14, size, "label")
        plot.rect(64, y, 220 * count / most, row - 9, "prefill", f"{count:.0f} wait")
        plot.text(WIDTH, y + 14, f"{count:.0f} wait · quota {quotas.get(name, 0):.0f} tokens", "tick", "end")
    plot.description = ", ".join(f"queue {name}: {waiting[name]:.0f} wait" for name in names)
    return plot
