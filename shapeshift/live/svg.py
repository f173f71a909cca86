"""Plots as text: SVG without scripts, whose colours come from the style sheet, each with a description in words."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

WIDTH = 460
"""Of a plot, in its own units: on a phone one is about a pixel."""


def escaped(text: object) -> str:
    """Text as it may stand in HTML and in attributes: names come from the server's users."""
    return html.escape(str(text), quote=True)


class Plot:
    """A drawing of `WIDTH` by `height`; y grows downwards. `title` says what it is, `description` what it shows now."""

    def __init__(self, height: float, title: str, note: str = "") -> None:
        """note: how to read it, below the title."""
        self.height, self.title, self.note = height, title, note
        self.description = ""
        self._parts: list[str] = []
        self._kinds: set[str] = set()
        self._legend: list[tuple[str, str]] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = "", round_: float = 0
    ) -> None:
        """A box of a kind that the style sheet colours; tip: shown where a pointer rests on it."""
        self._kinds.add(kind)
        radius = f' rx="{round_:g}"' if round_ else ""
        inside = f"<title>{escaped(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{max(height, 0):.1f}"{radius}'
            f' class="{kind}">{inside}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> None:
        """A line of a kind."""
        self._kinds.add(kind)
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "start") -> None:
        """Text whose base line begins, ends or is centred (`anchor`: start, end, middle) at a place."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escaped(text)}</text>'
        )

    def legend(self, *entries: tuple[str, str]) -> None:
        """What kinds mean: (kind, words). Kinds of which nothing is drawn are left out."""
        self._legend += entries

    def empty(self, text: str) -> None:
        """Say in its place why nothing is drawn."""
        self.text(WIDTH / 2, self.height / 2, text, "quiet", "middle")
        self.description = self.description or text

    def html(self) -> str:
        """The figure."""
        keys = "".join(
            f'<li><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" class="{kind}"/>'
            f"</svg>{escaped(words)}</li>"
            for kind, words in self._legend
            if kind in self._kinds
        )
        label = escaped(f"{self.title}. {self.description}".strip())
        return (
            f'<figure class="plot"><figcaption><b>{escaped(self.title)}</b>'
            + (f" <span>{escaped(self.note)}</span>" if self.note else "")
            + f'</figcaption><svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" aria-label="{label}">{PATTERNS}'
            + "".join(self._parts)
            + "</svg>"
            + (f'<ul class="legend">{keys}</ul>' if keys else "")
            + "</figure>"
        )


# Padding and waiting are told apart without colour.
PATTERNS = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="hatch-ground"/><rect width="2" height="6" class="hatch-line"/></pattern></defs>'
)


def tile(words: str, value: str, note: str = "", tone: str = "") -> str:
    """One number with what it is; note: how it compares. tone: good or bad."""
    below = f"<small>{escaped(note)}</small>" if note else ""
    return f'<div class="tile {tone}"><dt>{escaped(words)}</dt><dd>{escaped(value)}{below}</dd></div>'


def tiles(*each: str) -> str:
    """Numbers in a row."""
    return f'<dl class="tiles">{"".join(each)}</dl>'


def plots(*each: Plot) -> str:
    """Plots beside one another, as many as the page is wide."""
    return f'<div class="plots">{"".join(plot.html() for plot in each)}</div>'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], none: str) -> str:
    """A table; none: what it says without rows."""
    cells = ["".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells) or f'<tr><td colspan="{len(head)}">{escaped(none)}</td></tr>'
    titles = "".join(f'<th scope="col">{escaped(title)}</th>' for title in head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(caption)}"><table>'
        f"<caption>{escaped(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def number(value: float | None, unit: str = "") -> str:
    """A number in about three digits; a dash for None."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) >= 100 or value == int(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{text} {unit}".strip()


def percent(share: float | None) -> str:
    """A share of 1 as a whole percentage; a dash for None."""
    return "–" if share is None else f"{100 * share:.0f}%"


def compare(plot: Plot, rows: Sequence[tuple[str, float, str]], unit: str = "", left: float = 130.0) -> None:
    """Bars that lie one below the other: (words, value, kind) each."""
    most, step = max((value for _, value, _ in rows), default=0.0), min(40.0, plot.height / max(len(rows), 1))
    for place, (words, value, kind) in enumerate(rows):
        y, width = 2 + place * step, (WIDTH - left - 75) * value / most if most else 0.0
        plot.text(left - 6, y + step / 2 + 2, words, "label", "end")
        plot.rect(left, y, width, step - 8, kind, f"{words}: {number(value, unit)}")
        plot.text(left + width + 6, y + step / 2 + 2, number(value, unit), "tick")
    plot.description = ", ".join(f"{words}: {number(value, unit)}" for words, value, _ in rows)


def bars(plot: Plot, counts: Sequence[tuple[str, float, str]], top: float, bottom: float, kind: str = "one") -> None:
    """Upright bars over the whole width: (label below, height, tip) each, the largest from `top` to `bottom`."""
    most, step = max((value for _, value, _ in counts), default=0.0), WIDTH / max(len(counts), 1)
    for place, (label, value, tip) in enumerate(counts):
        height = (bottom - top) * value / most if most else 0.0
        plot.rect(place * step + 1, bottom - height, step - 2, height, kind, tip)
        if label:
            plot.text((place + 0.5) * step, bottom + 14, label, "tick", "middle")
    plot.line(0, bottom, WIDTH, bottom)
