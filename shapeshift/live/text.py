"""The panel of cascade: which level answers, how sure the first one is, and the time that it spares."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from shapeshift.live.source import HISTORY_S, View
from shapeshift.live.svg import WIDTH, Plot, number, percent, plots, tile, tiles
from shapeshift.serving.events import Event

NAME = "text"
TECHNIQUE = "cascade"
TITLE = "A small model first"
IDEA = (
    "Most texts are easy. A small model answers first and says how sure it is; only texts of which it is unsure go on"
    " to a large model. Watch: texts at the right, where the small model is sure, are answered early."
)
_BINS = 20
_KINDS = ("early", "late-level", "other", "bad-mark")


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first."""
    return view.busiest(view.page.models_with("level_texts_total"))


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    return _numbers(view, model) + plots(_confidence(view, model), _levels(view, model), _time(view, model))


class Saved(NamedTuple):
    """Mean milliseconds of a text: as it was, and if the large model had answered all (estimated)."""

    here_ms: float
    large_ms: float


def saved(texts: Sequence[Event]) -> Saved | None:
    """Of texts that ended at the first and at later levels; None where there are not both.

    A text that went on has spent the small model's time first: the large one alone would have taken the difference.
    """
    early = [text.values["ms"] for text in texts if text.values["level"] == 1]
    later = [text.values["ms"] for text in texts if text.values["level"] > 1]
    if not early or not later:
        return None
    return Saved(fmean(early + later), max(fmean(later) - fmean(early), 0.0))


def _numbers(view: View, model: str) -> str:
    minute, page = view.minute, view.page
    levels = minute.by(model, "level_texts_total", "level")
    total = sum(levels.values())
    early = page.total(model, "early_share_recent")
    profiled = early - page.total(model, "early_share_drift")
    result = saved(view.recent(model, "text", HISTORY_S))
    return tiles(
        tile("texts a second", number(view.change.rate(model, "request_tokens_count"))),
        tile(
            "answered by the small model",
            percent(levels.get("1", 0.0) / total if total else None),
            f"{percent(profiled)} when it was profiled",
            "good",
        ),
        tile(
            "mean time of a text",
            number(result.here_ms if result else None, "ms"),
            f"about {number(result.large_ms, 'ms')} if the large model answered all" if result else "",
        ),
        tile(
            "words not read again", number(minute.total(model, "words_pruned_total")), "by the large model, last minute"
        ),
        tile("kept an earlier answer", number(minute.total(model, "fallbacks_total")), "as a later level failed"),
    )


def _confidence(view: View, model: str) -> Plot:
    plot = Plot(170, "How sure the small model was", "last minute; left: unsure, right: sure; colour: who answered")
    texts = [text for text in view.recent(model, "text", HISTORY_S) if text.values["confidence"] is not None]
    if not texts:
        plot.empty("no text in the last minute")
        return plot
    counts = [[0] * len(_KINDS) for _ in range(_BINS)]
    for text in texts:
        place = min(int(text.values["confidence"] * _BINS), _BINS - 1)
        counts[place][min(text.values["level"], len(_KINDS)) - 1] += 1
    most, step, bottom = max(map(sum, counts)), WIDTH / _BINS, 136.0
    for place, levels in enumerate(counts):
        y = bottom
        for level, count in enumerate(levels):
            height = 130 * count / most
            if count:
                tip = f"sure by {place * 5} to {place * 5 + 5}%: {count} texts answered by level {level + 1}"
                plot.rect(place * step + 1, y - height, step - 2, height, _KINDS[level], tip)
            y -= height
    plot.line(0, bottom, WIDTH, bottom)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        plot.text(WIDTH * share, bottom + 15, percent(share), "tick", anchor)
    plot.text(WIDTH / 4, bottom + 30, "unsure", "tick", "middle")
    plot.text(WIDTH * 3 / 4, bottom + 30, "sure", "tick", "middle")
    plot.legend(("early", "answered by the small model"), ("late-level", "by the large model"))
    unsure = [text for text in texts if text.values["level"] > 1]
    mean = [fmean(text.values["confidence"] for text in each) for each in (texts, unsure) if each]
    plot.description = (
        f"{len(texts)} texts, on average sure by {percent(mean[0])}; {len(unsure)} went on to a larger model"
        + (f", on average sure by {percent(mean[1])}." if len(mean) > 1 else ".")
    )
    return plot


def _levels(view: View, model: str) -> Plot:
    plot = Plot(90, "Who answered, last minute", "the share of each level")
    levels = view.minute.by(model, "level_texts_total", "level")
    total = sum(levels.values())
    if not total:
        plot.empty("no text in the last minute")
        return plot
    x = 0.0
    for place, (level, count) in enumerate(sorted(levels.items())):
        width = WIDTH * count / total
        if count:
            plot.rect(x, 12, width - 1, 34, _KINDS[min(place, len(_KINDS) - 1)], f"level {level}: {count:.0f} texts")
            if width > 40:
                plot.text(x + width / 2, 34, percent(count / total), "inside", "middle")
            x += width
    shown = [(level, count) for level, count in sorted(levels.items()) if count]
    words = [f"level {level}: {count:.0f} texts" for level, count in shown]
    plot.legend(
        *((_KINDS[min(int(level) - 1, len(_KINDS) - 1)], word) for (level, _), word in zip(shown, words, strict=True))
    )
    plot.description = ", ".join(words)
    return plot


def _time(view: View, model: str) -> Plot:
    plot = Plot(110, "Mean time of a text", "last minute; the large model alone is an estimate from texts that went on")
    result = saved(view.recent(model, "text", HISTORY_S))
    if result is None:
        plot.empty("texts of both levels are needed to compare")
        return plot
    most = max(result)
    for place, (words, ms, kind) in enumerate(
        (("small first", result.here_ms, "early"), ("large alone", result.large_ms, "late-level"))
    ):
        y = 8 + place * 40
        plot.text(90, y + 19, words, "label", "end")
        plot.rect(98, y, (WIDTH - 170) * ms / most, 28, kind, f"{words}: {ms:.1f} ms")
        plot.text(104 + (WIDTH - 170) * ms / most, y + 19, number(ms, "ms"), "tick")
    plot.description = f"{result.here_ms:.1f} ms as it is, about {result.large_ms:.1f} ms with the large model alone"
    return plot
