"""The panel of cascade: which level answers, how sure the first one is, and the time that it spares."""

from __future__ import annotations

from statistics import fmean

from shapeshift.live.source import LAST_RATE, View
from shapeshift.live.svg import WIDTH, Plot, compare, number, percent, plots, tile, tiles

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


def names(view: View, model: str) -> list[str]:
    """What the levels are called, the first one first."""
    counts, times = view.page.by(model, "level_texts_total", "level"), level_ms(view, model)
    last = len(times) or max([2, *(int(level) for level, count in counts.items() if count)])
    return ["small model", *(f"model {level}" for level in range(2, last)), "large model"][:last]


def level_ms(view: View, model: str) -> list[float]:
    """The mean engine time of a text in each level, as profiled; empty if the server does not say."""
    times = view.page.by(model, "profiled_level_ms", "level")
    return [times[level] for level in sorted(times, key=int) if times[level]]


def _engine_ms(view: View, model: str) -> tuple[float, float] | None:
    """Mean engine milliseconds of a text: small first with the levels that answered, and the large model alone."""
    times = level_ms(view, model)
    counts = view.minute.by(model, "level_texts_total", "level")
    total = sum(counts.values())
    if len(times) < 2 or not total:
        return None
    spent = sum(count * sum(times[: int(level)]) for level, count in counts.items())
    return spent / total, times[-1]


def _numbers(view: View, model: str) -> str:
    minute, page = view.minute, view.page
    levels = minute.by(model, "level_texts_total", "level")
    total = sum(levels.values())
    early = page.total(model, "early_share_recent")
    profiled = early - page.total(model, "early_share_drift")
    accuracy, large = (page.total(model, f"profiled_{name}accuracy") for name in ("", "last_level_"))
    pruned, fallbacks = (minute.total(model, name) for name in ("words_pruned_total", "fallbacks_total"))
    texts = view.recent(model, "text", view.minute_s)
    parts = [
        tile("texts a second", number(view.change.rate(model, "request_tokens_count")), LAST_RATE),
        tile(
            "answered by the small model",
            percent(levels.get("1", 0.0) / total if total else None),
            f"{view.minute_words}; {percent(profiled)} of the texts of its profile",
            "good" if total and levels.get("1", 0.0) > total / 2 else "",
        ),
        tile(
            "mean time of a text",
            number(fmean(text.values["ms"] for text in texts) if texts else None, "ms"),
            f"{view.minute_words}, waiting counts",
        ),
    ]
    if accuracy:
        note = f"{100 * large:.1f}% the large model alone; both as profiled" if large else "as profiled"
        parts.insert(2, tile("right answers", f"{100 * accuracy:.1f}%", note))
    if pruned:
        parts.append(tile("words not read again", number(pruned), f"by the large model, {view.minute_words}"))
    if fallbacks:
        parts.append(
            tile("kept an earlier answer", number(fallbacks), f"as the next model failed, {view.minute_words}")
        )
    return tiles(*parts)


def _confidence(view: View, model: str) -> Plot:
    plot = Plot(
        170, "How sure the small model was", f"{view.minute_words}; a bar: how many texts; colour: who answered"
    )
    texts = [text for text in view.recent(model, "text", view.minute_s) if text.values["confidence"] is not None]
    if not texts:
        plot.empty(f"no text in the {view.minute_words}")
        return plot
    counts = [[0] * len(_KINDS) for _ in range(_BINS)]
    for text in texts:
        place = min(int(text.values["confidence"] * _BINS), _BINS - 1)
        counts[place][min(text.values["level"], len(_KINDS)) - 1] += 1
    called = names(view, model)
    most, step, bottom = max(map(sum, counts)), WIDTH / _BINS, 136.0
    for place, levels in enumerate(counts):
        y = bottom
        for level, count in enumerate(levels):
            height = 130 * count / most
            if count:
                who = called[min(level, len(called) - 1)]
                tip = f"sure by {place * 5} to {place * 5 + 5}%: {count} texts answered by the {who}"
                plot.rect(place * step + 1, y - height, step - 2, height, _KINDS[level], tip)
            y -= height
    plot.line(0, bottom, WIDTH, bottom)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        plot.text(WIDTH * share, bottom + 15, percent(share), "tick", anchor)
    plot.text(WIDTH / 4, bottom + 30, "unsure", "tick", "middle")
    plot.text(WIDTH * 3 / 4, bottom + 30, "sure", "tick", "middle")
    threshold = view.page.total(model, "first_level_threshold")
    if threshold:
        plot.line(WIDTH * threshold, 0, WIDTH * threshold, bottom, "mark")
        plot.legend(("mark", f"threshold, {percent(threshold)}: left of it every text goes on"))
    plot.legend(*((_kind(level), f"answered by the {name}") for level, name in enumerate(called, 1)))
    unsure = [text for text in texts if text.values["level"] > 1]
    mean = [fmean(text.values["confidence"] for text in each) for each in (texts, unsure) if each]
    plot.description = (
        f"{len(texts)} texts, on average sure by {percent(mean[0])}; {len(unsure)} went on to a larger model"
        + (f", on average sure by {percent(mean[1])}." if len(mean) > 1 else ".")
    )
    return plot


def _levels(view: View, model: str) -> Plot:
    plot = Plot(60, f"Who answered, {view.minute_words}", "the share of each model")
    levels = view.minute.by(model, "level_texts_total", "level")
    total = sum(levels.values())
    if not total:
        plot.empty(f"no text in the {view.minute_words}")
        return plot
    x, words = 0.0, []
    for level, name in enumerate(names(view, model), 1):
        count, kind = levels.get(str(level), 0.0), _kind(level)
        if not count:
            continue
        width = WIDTH * count / total
        words.append(f"{name}: {count:.0f} texts")
        plot.rect(x, 12, width - 1, 34, kind, words[-1])
        plot.legend((kind, words[-1]))
        if width > 40:
            plot.text(x + width / 2, 34, percent(count / total), "inside", "middle")
        x += width
    plot.description = ", ".join(words)
    return plot


def _kind(level: int) -> str:
    return _KINDS[min(level, len(_KINDS)) - 1]


def _time(view: View, model: str) -> Plot:
    plot = Plot(
        80,
        "Engine time of a text",
        f"without waiting: the time of each model in its profile, for who answered in the {view.minute_words}",
    )
    result = _engine_ms(view, model)
    if result is None:
        plot.empty("no text, or no profile of two models")
        return plot
    compare(plot, (("small model first", result[0], "early"), ("large model alone", result[1], "late-level")), "ms")
    return plot
