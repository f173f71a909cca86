"""The panel of token_adapt: each batch with its deadline and gamma, and what that earns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shapeshift.live.source import RATE_S, View
from shapeshift.live.svg import WIDTH, Plot, number, percent, plots, tile, tiles
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
_FEWEST_BATCHES = 5


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    return view.busiest(view.page.models_with("gamma_images_total"))


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    return _numbers(view, model) + plots(_batches(view, model), _earned(view, model), _by_gamma(view, model))


class Earned(NamedTuple):
    """Utility a second: of the gammas that were chosen, and of each gamma had it been the only one."""

    here: float
    fixed: dict[int, float]


def gammas(view: View, model: str) -> list[int]:
    """The gammas that the model has, the fastest first."""
    return sorted(int(gamma) for gamma in view.page.by(model, "gamma_images_total", "gamma"))


def earned(view: View, model: str, seconds: float = RATE_S) -> Earned | None:
    """What the batches of the last seconds earned; None where too few ran to compare.

    At a fixed gamma the same batches, and the images that were dropped here, run one after another, each as soon as its
    images are there and the one before has ended; one that would end after its deadline is left out and takes no time.
    No server does so well: nothing waits, and what will be late is known before it runs.
    """
    batches = view.recent(model, "batch", seconds)
    if len(batches) < _FEWEST_BATCHES:
        return None
    levels = gammas(view, model)
    here = sum(
        batch.values["earns"][levels.index(batch.values["gamma"])] * batch.values["in_time"] / batch.values["images"]
        for batch in batches
    )
    return Earned(
        here / seconds, {gamma: _alone(batches, levels, place) / seconds for place, gamma in enumerate(levels)}
    )


def _alone(batches: Sequence[Event], levels: Sequence[int], place: int) -> float:
    """The utility of the batches where all run at the gamma at `place`."""
    free_at, worth = 0.0, 0.0
    for batch in batches:
        values, costs = batch.values, batch.values["costs"]
        took_s = values["ms"] / 1e3
        ready = batch.at - took_s - values["waited"] / 1e3
        takes_s = took_s * costs[place] / costs[levels.index(values["gamma"])]
        end = max(ready, free_at) + takes_s
        if end <= batch.at + values["slack"] / 1e3:
            free_at = end
            worth += values["earns"][place]
    return worth


def _numbers(view: View, model: str) -> str:
    change = view.change
    outcomes = change.by(model, "images_total", "outcome")
    settled = sum(outcomes.values())
    in_time = outcomes.get("in_time", 0.0)
    batches = change.total(model, "batch_images_count")
    refused = change.by(model, "requests_total", "code").get("UNAVAILABLE", 0.0)
    return tiles(
        tile("images a second", number(settled / change.seconds if settled else 0.0)),
        tile(
            "in time",
            percent(in_time / settled if settled else None),
            f"{outcomes.get('late', 0.0):.0f} late, {outcomes.get('evicted', 0.0):.0f} dropped, {refused:.0f} refused",
            "good",
        ),
        tile("images in a batch", number(change.total(model, "batch_images_sum") / batches if batches else None)),
        tile("utility earned a second", number(change.rate(model, "utility_total"))),
        tile("time of a batch against its profile", f"{number(view.page.total(model, 'cost_factor'))} times"),
    )


def _batches(view: View, model: str) -> Plot:
    levels = gammas(view, model)
    row = 22.0
    plot = Plot(
        30 + row * len(levels),
        "Batches",
        f"last {_SECONDS:.0f} seconds; a box is a batch, the line ends at its deadline",
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
    plot.legend(("in-time", "in time"), ("late", "some late"), ("whisker-key", "time that was left"))
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
    height = 4 + (row - 9) * values["images"] / most
    late = values["images"] - values["in_time"]
    tip = f"{values['images']} images at gamma {values['gamma']}, {values['ms']} ms, {late} late"
    plot.rect(start, y + row - 3 - height, max(end - start, 1.5), height, "late" if late else "in-time", tip)
    if values["slack"] > 0:
        middle = y + row - 3 - height / 2
        plot.line(end, middle, min(end + values["slack"] / 1e3 * per_second, WIDTH), middle, "whisker")


def _earned(view: View, model: str) -> Plot:
    plot = Plot(
        196,
        "Utility a second",
        "last 10 seconds; below: the same batches, all at one gamma (replayed at its best: without a pause)",
    )
    result = earned(view, model)
    if result is None:
        plot.empty("too few batches in the last seconds")
        return plot
    rows = [("chosen each time", result.here, "ours")]
    rows += [(f"always gamma {gamma}", worth, "fixed") for gamma, worth in reversed(result.fixed.items())]
    most, row, left = max(worth for _, worth, _ in rows) or 1.0, min(22.0, 190 / len(rows)), 140.0
    for place, (words, worth, kind) in enumerate(rows):
        y = 2 + place * row
        plot.text(left - 6, y + row - 7, words, "label", "end")
        plot.rect(left, y, (WIDTH - left - 56) * worth / most, row - 5, kind, f"{words}: {worth:.1f} a second")
        plot.text(left + (WIDTH - left - 56) * worth / most + 6, y + row - 7, number(worth), "tick")
    best = max(result.fixed, key=lambda gamma: result.fixed[gamma])
    plot.description = (
        f"Chosen for each batch: {result.here:.1f}. The best fixed gamma, {best}: {result.fixed[best]:.1f}."
    )
    return plot


def _by_gamma(view: View, model: str) -> Plot:
    plot = Plot(120, "Images by gamma, last minute", "left: fewer tokens, faster; right: more tokens, more accurate")
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
