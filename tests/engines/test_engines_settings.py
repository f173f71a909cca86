"""The ranges of the parameters that say how engines are built."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.engines.settings import TextEngineSettings
from shapeshift.errors import InvalidInputError
from tests.limits import Limits, cases, require_limit

LEAST: Limits = {"layers": (0, -1), "max_tokens": (1, 0), "max_bins": (1, 0)}
MOST: Limits = {"max_tokens": (8192, 8193), "max_bins": (64, 65)}


def made(**given: Any) -> TextEngineSettings:
    return TextEngineSettings("checkpoint", **given)


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(made, name, within, beyond)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint", ""),
        ("provider", "abacus"),
        ("precision", "f64"),
        ("pooling", "mean,median"),
        ("pooling", "auto,mean"),
        ("normalize", "yes"),
    ],
)
def test_other_words_are_refused(name: str, value: str) -> None:
    given: dict[str, Any] = {"checkpoint": "a", name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}: got '{value}'"):
        TextEngineSettings(**given)


def test_several_poolings_are_taken() -> None:
    assert made(pooling="mean,cls").pooling == "mean,cls"


@pytest.mark.parametrize(
    ("bins", "edges"),
    [("histogram", None), ("staircase", None), ("none", []), ("16", [16]), ("1,16, 512", [1, 16, 512])],
)
def test_bins_are_computed_or_listed(bins: str, edges: list[int] | None) -> None:
    assert made(bins=bins, max_tokens=512).explicit_edges() == edges


@pytest.mark.parametrize("bins", ["", "16,", "16,x", "32,16", "16,16", "0,16", "16,513", "-1"])
def test_bins_that_do_not_ascend_within_the_range_are_refused(bins: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^bins: got '{bins}'; histogram, .* from 1 to 512$"):
        made(bins=bins, max_tokens=512)


def test_without_the_dynamic_engine_the_bins_reach_the_longest_text() -> None:
    assert not made(dynamic=False, bins="16,64,512", max_tokens=512).dynamic
    assert not made(dynamic=False, bins="histogram").dynamic
    with pytest.raises(InvalidInputError, match=r"the last edge must be max_tokens \(512\)"):
        made(dynamic=False, bins="16,511", max_tokens=512)
    with pytest.raises(InvalidInputError, match="^bins: got '16'"):
        made(dynamic=False, bins="16", max_tokens=512)
    assert not made(dynamic=False, bins="512", max_tokens=512).dynamic
    with pytest.raises(InvalidInputError, match="not none when dynamic is false"):
        made(dynamic=False, bins="none")


def test_with_the_dynamic_engine_bins_may_end_before_the_longest_text() -> None:
    assert made(bins="16", max_tokens=512).explicit_edges() == [16]
    assert (made().dynamic, made().packing) == (True, True)
