"""Draws docs/figures/request.svg, how a request runs: `python docs/figures/request.py`."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 920, 350
_FONT = "font-family='Helvetica, Arial, sans-serif'"
# Each box: left, top, width, height, colour, title, lines below it.
BOXES = (
    (20, 70, 130, 90, "#e8eef7", "client", ("tritonclient, curl,", "perf_analyzer")),
    (190, 20, 500, 200, "#f6f6f6", "Triton Inference Server", ()),
    (
        210,
        60,
        200,
        140,
        "#dcebdc",
        "front model",
        ("checks, tokenises, decides:", "engine, batch, slot or level;", "sends the response"),
    ),
    (
        470,
        60,
        200,
        140,
        "#f9ead2",
        "engines",
        ("one for each length,", "gamma or level,", "or one decode loop with", "cached LoRA adapters"),
    ),
    (
        740,
        60,
        160,
        140,
        "#f2dfe6",
        "registry",
        ("tasks, adapters,", "candidates; commands", "change it while", "models serve"),
    ),
    (
        190,
        260,
        500,
        70,
        "#e6e2f3",
        "sidecar",
        (
            "scrapes /metrics each second, plans,",
            "reloads and changes workers",
        ),
    ),
)
# Each arrow: from, to, whether it has two heads.
ARROWS = (
    ((150, 115), (210, 115), True),
    ((410, 130), (470, 130), True),
    ((740, 130), (670, 130), False),
    ((440, 260), (440, 220), True),
)


def svg() -> str:
    """The figure as text."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>"
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='#444'/></marker></defs>"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
    )
    return "\n".join([head, *(_box(*box) for box in BOXES), *(_arrow(*arrow) for arrow in ARROWS), "</svg>"]) + "\n"


def _box(left: int, top: int, width: int, height: int, colour: str, title: str, lines: tuple[str, ...]) -> str:
    middle = left + width / 2
    parts = [f"<rect x='{left}' y='{top}' width='{width}' height='{height}' rx='6' fill='{colour}' stroke='#888'/>"]
    parts.append(_text(middle, top + 24, title, 16, "bold"))
    parts += [_text(middle, top + 45 + 19 * number, line, 13) for number, line in enumerate(lines)]
    return "\n".join(parts)


def _text(x: float, y: float, text: str, size: int, weight: str = "normal") -> str:
    style = f"{_FONT} font-size='{size}' font-weight='{weight}' text-anchor='middle' fill='#222'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{text}</text>"


def _arrow(start: tuple[int, int], end: tuple[int, int], both: bool) -> str:
    begin = " marker-start='url(#head)'" if both else ""
    line = f"x1='{start[0]}' y1='{start[1]}' x2='{end[0]}' y2='{end[1]}'"
    return f"<line {line} stroke='#444' stroke-width='1.6'{begin} marker-end='url(#head)'/>"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg())
