"""The plot of gains shows what the committed results of the benchmarks hold."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import gains
from shapeshift.errors import NotFoundError

SVG = "{http://www.w3.org/2000/svg}"


def shown(file: Path) -> dict[str, str]:
    """The figure of each bar of a plot, by technique."""
    groups = ElementTree.parse(file).getroot().iter(f"{SVG}g")
    marked = {group.get("id", ""): group for group in groups}
    return {
        name.removeprefix("gain-"): "".join(group.itertext()).strip()
        for name, group in marked.items()
        if name.startswith("gain-")
    }


def test_the_plot_shows_the_figures_of_the_results() -> None:
    read = gains.read()
    assert shown(gains.PLOT) == {gain.technique: gain.label for gain in read}
    text = gains.PLOT.read_text()
    assert all(part in text for gain in read for part in (gain.other, gain.what.replace("'", "&#39;")[:20]))
    assert gains.PLOT.stat().st_size < 60_000


def test_every_result_says_where_and_when_it_was_measured() -> None:
    for gain in gains.read():
        assert gain.ratio > 0 and "seed" in str(gain.result["settings"])
        command, _, rest = gain.source.partition(": ")
        assert f"python -m bench.{gain.benchmark}" in command and "cores, 20" in rest


def test_other_results_give_another_plot(tmp_path: Path) -> None:
    changed = [
        gains.Gain("one", "what", "other", 1.234, "encode", {}, "a"),
        gains.Gain("two", "x", "y", 0.5, "encode", {}),
    ]
    gains.draw(changed, tmp_path / "plot.svg")
    assert shown(tmp_path / "plot.svg") == {"one": "1.23x", "two": "0.50x"}


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"encode\.json: run `make bench BENCH=encode`"):
        gains.read(tmp_path)
