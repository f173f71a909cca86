"""The panel of token_adapt: each batch with its deadline and gamma, and what that earns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shapeshift.live.source import LAST_RATE, RATE_S, View
from shapeshift.live.svg import WIDTH, Plot, compare, number, percent, plots, tile, tiles
from shapeshift.serving.events import Event

NAME = "image"
TECHNIQUE = "token_adapt"
TITLE = "Images with deadlines"
IDEA = (
    "Each image has a deadline and a worth. A batch may drop tokens of its images (gamma below 0: faster, a little less"
    " accurate) or add some (above 0: slower, more accurate). Before each batch the server chooses the gamma that earns"
    " most in all. Watch: when many images come at once, batches move down to faster gammas."
)
_SECONDS = 6.0
# Shares of images in time: from `_GOOD` all is well, below `_OVERLOAD` the machine has too much to do.
_GOOD, _OVERLOAD = 0.9, 0.7
# From so many times the profiled time of a batch the machine is said to be slower.
_SLOW = 1.25


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    return view.busiest(view.page.models_with("gamma_images_total"))


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    return _numbers(view, model) + plots(_batches(view, model), _earned(view, model), _by_gamma(view, model))


class Worth(NamedTuple):
    """Utility a second of the images that were settled.

    earned       by images in time
    given_up     more than that at the most accurate gamma that they have
    late         of images that ended after their deadline
    dropped      of images that were not run, as they would have been late
    """

    earned: float
    given_up: float
    late: float
    dropped: float


def worth(view: View, model: str, seconds: float = RATE_S) -> Worth | None:
    """What the images of the last seconds earned, and what all would have earned in time at the best gamma."""
    levels = gammas(view, model)
    batches, dropped = view.recent(model, "batch", seconds), view.recent(model, "dropped", seconds)
    if not batches and not dropped:
        return None
    earned = given_up = late = 0.0
    for values in (batch.values for batch in batches):
        share, here, best = (
            values["in_time"] / values["images"],
            values["earns"][levels.index(values["gamma"])],
            max(values["earns"]),
        )
        earned, given_up, late = earned + share * here, given_up + share * (best - here), late + (1 - share) * best
    lost = sum(max(one.values["earns"]) for one in dropped)
    return Worth(earned / seconds, given_up / seconds, late / seconds, lost / seconds)


def gammas(view: View, model: str) -> list[int]:
    """The gammas that the model has, the fastest first."""
    return sorted(int(gamma) for gamma in view.page.by(model, "gamma_images_total", "gamma"))


def _numbers(view: View, model: str) -> str:
    change = view.change
    outcomes = change.by(model, "images_total", "outcome")
    settled = sum(outcomes.values())
    share = outcomes.get("in_time", 0.0) / settled if settled else None
    batches = change.total(model, "batch_images_count")
    refused = change.by(model, "requests_total", "code").get("UNAVAILABLE", 0.0)
    factor = view.page.total(model, "cost_factor")
    slow = factor >= _SLOW
    overload = (
        '<p class="note bad">Overload: more images arrive at once than this machine can answer in time. The server'
        " drops those that would be late.</p>"
        if share is not None and share < _OVERLOAD
        else ""
    )
    return overload + tiles(
        tile("images a second", number(settled / change.seconds if settled else 0.0), f"{LAST_RATE}, dropped ones too"),
        tile(
            "in time",
            percent(share),
            f"{LAST_RATE}: {outcomes.get('late', 0.0):.0f} late, {outcomes.get('evicted', 0.0):.0f} dropped,"
            f" {refused:.0f} requests refused",
            "" if share is None else "good" if share >= _GOOD else "bad" if overload else "",
        ),
        tile(
            "images in a batch",
            number(change.total(model, "batch_images_sum") / batches if batches else None),
            f"mean of the {LAST_RATE}",
        ),
        tile("utility earned a second", number(change.rate(model, "utility_total")), LAST_RATE),
        tile(
            "speed of the machine",
            f"{number(factor)} times slower" if slow else "as measured" if factor else "–",
            "than when this model was built: others may use it" if slow else "when this model was built",
        ),
    )


def _batches(view: View, model: str) -> Plot:
    levels = gammas(view, model)
    row = 22.0
    plot = Plot(
        30 + row * len(levels),
        "Batches",
        f"last {_SECONDS:.0f} seconds; a box is a batch, as high as it has images;"
        " the line behind it ends at the deadline",
    )
    batches = view.recent(model, "batch", _SECONDS)
    left = 76.0
    per_second = (WIDTH - left) / _SECONDS
    for place, gamma in enumerate(reversed(levels)):
        y = 2 + place * row
        plot.text(0, y + 14, f"gamma {gamma}", "tick")
        plot.line(left, y + row - 3, WIDTH, y + row - 3)
    most = max([batch.values["images"] for batch in batches], default=1)
    for batch in batches:
        _batch(plot, batch, levels, left, per_second, row, most, view.now)
    bottom = 2 + row * len(levels)
    for seconds, anchor in ((0.0, "start"), (_SECONDS / 2, "middle"), (_SECONDS, "end")):
        text = "now" if seconds == _SECONDS else f"-{_SECONDS - seconds:.0f} s"
        plot.text(left + seconds * per_second, bottom + 14, text, "tick", anchor)
    plot.legend(("in-time", "in time"), ("late", "some late"), ("whisker", "time that was left until the deadline"))
    plot.description = f"{len(batches)} batches in the last {_SECONDS:.0f} seconds; by gamma: " + (
        ", ".join(f"{gamma}: {sum(one.values['gamma'] == gamma for one in batches)}" for gamma in levels)
    )
    return plot


def _batch(
    plot: Plot, batch: Event, levels: Sequence[int], left: float, per_second: float, row: float, most: int, now: float
) -> None:
    values = batch.values
    if values["gamma"] not in levels:
        return
    y = 2 + (len(levels) - 1 - levels.index(values["gamma"])) * row
    end = left + (batch.at - now + _SECONDS) * per_second
    start = max(end - values["ms"] / 1e3 * per_second, left)
    start = min(start, WIDTH - 1.5)
    height = 4 + (row - 9) * values["images"] / most
    late = values["images"] - values["in_time"]
    tip = f"{values['images']} images at gamma {values['gamma']}, {values['ms']} ms, {late} late"
    plot.rect(start, y + row - 3 - height, max(end - start, 1.5), height, "late" if late else "in-time", tip)
    if values["slack"] > 0:
        middle = y + row - 3 - height / 2
        plot.line(end, middle, min(end + values["slack"] / 1e3 * per_second, WIDTH), middle, "whisker")


def _earned(view: View, model: str) -> Plot:
    plot = Plot(
        160,
        "What arrived, and what it earned",
        f"utility a second, {LAST_RATE}; arrived: had all been in time at the most accurate gamma",
    )
    result = worth(view, model)
    if result is None:
        plot.empty(f"no image in the {LAST_RATE}")
        return plot
    kinds = ("ours", "lent", "late", "padding")
    words = ("earned", "less accurate", "late", "dropped")
    rows = [*zip(words, result, kinds, strict=True)]
    compare(plot, [("arrived", sum(result), "fixed"), *(row for row in rows if row[1] or row[0] == "earned")])
    return plot


def _by_gamma(view: View, model: str) -> Plot:
    plot = Plot(
        120, f"Images by gamma, {view.minute_words}", "left: fewer tokens, faster; right: more tokens, more accurate"
    )
    counts = view.minute.by(model, "gamma_images_total", "gamma")
    levels = gammas(view, model)
    if not sum(counts.values()):
        plot.empty("no image in the last minute")
        return plot
    step, most = WIDTH / len(levels), max(counts.values())
    for place, gamma in enumerate(levels):
        count = counts[str(gamma)]
        plot.rect(
            place * step + 4, 96 - 80 * count / most, step - 8, 80 * count / most, "in-time", f"{count:.0f} images"
        )
        plot.text((place + 0.5) * step, 112, gamma, "tick", "middle")
        if count:
            plot.text((place + 0.5) * step, 91 - 80 * count / most, f"{count:.0f}", "tick", "middle")
    plot.line(0, 96, WIDTH, 96)
    plot.description = ", ".join(f"gamma {gamma}: {counts[str(gamma)]:.0f} images" for gamma in levels)
    return plot
