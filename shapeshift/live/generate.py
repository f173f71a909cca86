"""The panel of fused_decode: who holds which slot, what the memory holds, how soon tokens come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shapeshift.live.source import LAST_RATE, View
from shapeshift.live.svg import WIDTH, Plot, bars, compare, number, percent, plots, tile, tiles

NAME = "generate"
TECHNIQUE = "fused_decode"
TITLE = "Texts that are generated together"
IDEA = (
    "Each step of the model gives every running text its next token, so many texts cost little more than one. A request"
    " joins at the next step and leaves when it is done: nobody waits for a batch to fill or to end. Watch: bars begin"
    " and end whenever they like."
)
SECONDS = 20.0
STATES = (
    ("empty", "empty"),
    ("kept", "kept for texts that begin alike"),
    ("decode", "held by one text"),
    ("shared", "shared by several texts"),
    ("lent", "lent to adapters"),
)
_ROWS = 18
_MOST_CELLS = 1000
_PERIODS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    with_adapters = view.page.models_with("adapters_known")
    return view.busiest(model for model in view.page.models_with("slots") if model not in with_adapters)


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    return numbers(view, model) + plots(
        slots(view, model), memory(view, model), _weight_reads(view, model), times(view, model)
    )


@dataclass
class Stay:
    """A request in its slots, several with beams. Times: monotonic seconds; None: not yet. why: it left."""

    slots: Sequence[int]
    joined: float
    prompt: int
    shared: int
    adapter: int
    first: float | None = None
    left: float | None = None
    tokens: int = 0
    why: str = ""


def stays(view: View, model: str) -> list[Stay]:
    """Who held a slot in the last `SECONDS`, in order."""
    in_slot: dict[int, Stay] = {}
    ended: list[Stay] = []

    def leave(stay: Stay) -> None:
        for slot in stay.slots:
            in_slot.pop(slot, None)

    for event in view.events.get(model, ()):
        values = event.values
        stay = in_slot.get(values.get("slot", -1))
        if event.kind == "join":
            slots_ = values["slots"]
            # A record has no room for more than about 80 slots: then it says how many, the first of which it names.
            slots_ = slots_ if isinstance(slots_, list) else range(values["slot"], values["slot"] + slots_)
            if stay is not None:
                leave(stay)
            stay = Stay(slots_, event.at, values["prompt"], values["shared"], values["adapter"])
            in_slot.update(dict.fromkeys(slots_, stay))
        elif event.kind == "first" and stay is not None:
            stay.first = stay.first or event.at
        elif event.kind == "leave" and stay is not None:
            stay.left, stay.tokens, stay.why = event.at, values["tokens"], values["why"]
            ended.append(stay)
            leave(stay)
        elif event.kind == "clear":
            for one in {id(one): one for one in in_slot.values()}.values():
                one.left, one.why = event.at, values["why"]
                ended.append(one)
            in_slot.clear()
    running = {id(one): one for one in in_slot.values()}.values()
    return [stay for stay in [*ended, *running] if (stay.left or view.now) > view.now - SECONDS]


def numbers(view: View, model: str) -> str:
    """The row of numbers."""
    change, page = view.change, view.page
    steps, tokens = change.total(model, "iteration_ms_count"), change.total(model, "generated_tokens_total")
    queries, hits = (view.minute.total(model, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    used, slots_ = page.total(model, "requests_running"), page.total(model, "slots")
    return tiles(
        tile("tokens a second", number(change.rate(model, "generated_tokens_total")), LAST_RATE),
        tile(
            "texts advanced by a step",
            number(tokens / steps if steps else None),
            f"mean of the {LAST_RATE}; a step reads all weights once",
            "good" if tokens > 1.5 * steps else "",
        ),
        tile(
            "slots in use now",
            f"{used:.0f} of {slots_:.0f}",
            f"{page.total(model, 'requests_waiting'):.0f} wait for one",
        ),
        tile(
            "prompt tokens not computed",
            percent(hits / queries if queries else None),
            f"{view.minute_words}; shared with earlier texts",
        ),
        tile("98% of first tokens within", number(change.quantile(model, "first_token_ms", 0.98), "ms"), LAST_RATE),
    )


def slots(view: View, model: str) -> Plot:
    """The raster of slots over time."""
    held = stays(view, model)
    rows = sorted({slot for stay in held for slot in stay.slots})[:_ROWS]
    row = max(11.0, min(20.0, 230 / max(len(rows), 1)))
    plot = Plot(
        34 + row * max(len(rows), 4),
        "Slots",
        f"last {SECONDS:.0f} seconds, now at the right; a bar is a request, the number in it its tokens",
    )
    if not rows:
        plot.empty("no request had a slot in this time")
        return plot
    left = 26.0
    per_second = (WIDTH - left) / SECONDS

    def x(at: float) -> float:
        return left + max(at - (view.now - SECONDS), 0.0) * per_second

    bottom = 4 + row * len(rows)
    for seconds in range(0, int(SECONDS) + 1, 5):
        place = x(view.now - SECONDS + seconds)
        plot.line(place, 2, place, bottom)
        plot.text(
            place, bottom + 14, "now" if seconds == SECONDS else f"-{SECONDS - seconds:.0f} s", "tick", _anchor(seconds)
        )
    for place, slot in enumerate(rows):
        plot.text(0, 4 + place * row + row / 2 + 4, slot, "tick")
    for stay in held:
        for slot in stay.slots:
            if slot in rows:
                _stay(plot, stay, 4 + rows.index(slot) * row, row, x, view.now)
    plot.legend(("prefill", "reads its prompt"), ("decode", "generates"), ("bad-mark", "lost its slot, or failed"))
    done = [stay for stay in held if stay.left is not None]
    plot.description = (
        f"In the last {SECONDS:.0f} seconds {len(done)} requests left their slots after"
        f" {sum(stay.tokens for stay in done)} tokens, {len(held) - len(done)} hold one now."
    )
    return plot


def _anchor(seconds: float) -> str:
    return {0: "start", int(SECONDS): "end"}.get(int(seconds), "middle")


def _stay(plot: Plot, stay: Stay, y: float, row: float, x: Callable[[float], float], now: float) -> None:
    left = stay.left or now
    first = min(stay.first or left, left)
    shared = f", {stay.shared} of them shared" if stay.shared else ""
    words = f"prompt of {stay.prompt} tokens{shared}"
    plot.rect(x(stay.joined), y, x(first) - x(stay.joined), row - 3, "prefill", f"reads its {words}")
    if first < left:
        tip = f"{stay.tokens} tokens, {words}; left: {stay.why}" if stay.why else f"generates; {words}"
        plot.rect(x(first), y, x(left) - x(first) - 0.5, row - 3, "decode", tip)
        if stay.tokens and x(left) - x(first) > 44 and row >= 13:
            plot.text(x(left) - 4, y + row / 2 + 2.5, stay.tokens, "inside", "end")
    if stay.why in ("preempted", "failed"):
        plot.rect(x(left) - 2.5, y, 3, row - 3, "bad-mark", stay.why)


def memory(view: View, model: str) -> Plot:
    """The blocks of keys and values, by who holds them."""
    counts = block_counts(view, model)
    each = math.ceil(sum(counts) / _MOST_CELLS)
    cells = [math.ceil(count / each) if each else 0 for count in counts]
    total = sum(cells)
    cell = f"{each} blocks" if each > 1 else "a block"
    plot = Plot(176, "Memory of the texts", f"a cell is {cell} of tokens; texts that begin alike share theirs")
    if not total:
        plot.empty("no request had a slot in the last minute")
        return plot
    columns = math.ceil(math.sqrt(total * WIDTH / 160))
    size = min(WIDTH / columns, 160 / math.ceil(total / columns))
    place = 0
    # What texts hold comes first: it grows and shrinks at the front.
    for state in (3, 2, 1, 4, 0):
        kind, words = STATES[state]
        for _ in range(cells[state]):
            plot.rect(place % columns * size, place // columns * size, size - 1, size - 1, kind, words)
            place += 1
    plot.legend(*((kind, f"{words}: {count}") for (kind, words), count in zip(STATES, counts, strict=True) if count))
    plot.description = ", ".join(f"{count} blocks {words}" for (_, words), count in zip(STATES, counts, strict=True))
    return plot


def block_counts(view: View, model: str) -> Sequence[int]:
    """The blocks in each of `STATES` when a request last joined or left."""
    last = [event for event in view.events.get(model, ()) if event.kind in ("join", "leave", "clear")][-1:]
    return last[0].values["blocks"] if last else [0] * len(STATES)


def _weight_reads(view: View, model: str) -> Plot:
    plot = Plot(90, "Reads of all weights a second", f"{LAST_RATE}; a read gives each running text its next token")
    steps, tokens = (view.change.rate(model, name) for name in ("iteration_ms_count", "generated_tokens_total"))
    if not steps:
        plot.empty(f"no step in the {LAST_RATE}")
        return plot
    compare(plot, (("here: together", steps, "decode"), ("one text at a time", tokens, "fixed")))
    return plot


def times(view: View, model: str) -> Plot:
    """How long first tokens and further tokens take."""
    plot = Plot(
        190,
        f"Times, {view.minute_words}",
        "above: until the first token; below: from a token to the next; a bar is the share that took up to so many ms,"
        " and more than the bar before it",
    )
    said = []
    for top, name, words in ((0.0, "first_token_ms", "first token"), (98.0, "between_tokens_ms", "next token")):
        counts = view.minute.histogram(model, name)
        total = sum(counts.values())
        half, most = (view.minute.quantile(model, name, share) for share in (0.5, 0.98))
        text = f"half within {number(half, 'ms')}, 98% within {number(most, 'ms')}" if total else "none"
        plot.text(WIDTH, top + 11, f"{words}: {text}", "tick", "end")
        plot.text(0, top + 11, "up to … ms:", "tick")
        said.append(f"{words}: {text}")
        bounds, edges = [0.0, *map(float, _PERIODS)], [*map(float, _PERIODS), math.inf]
        binned = [
            (
                f"{edge:.0f}" if math.isfinite(edge) else "more",
                sum(count for bound, count in counts.items() if low < bound <= edge),
            )
            for low, edge in zip(bounds, edges, strict=True)
        ]
        bars(
            plot,
            [(label, count, f"{'up to ' * label.isdecimal()}{label}: {count:.0f}") for label, count in binned],
            top + 16,
            top + 70,
        )
    plot.description = "; ".join(said)
    return plot
