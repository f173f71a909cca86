"""The ranges of the parameters of an image model, and its tensors."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.settings import MAX_LATENCY_MS, TokenAdaptSettings, signature
from tests.limits import Limits, cases, require_limit

FROM_ZERO = ("latency_ms", "batch_deadline_ms", "batch_utility", "price_window_ms", "margin_ms", "slo_ms")
LEAST: Limits = {
    **dict.fromkeys(FROM_ZERO, (0.0, -0.01)),
    "memory_mb": (0, -1),
    "batch_size": (0, -1),
    "queue_mb": (1, 0),
    "max_pixels": (1, 0),
    "decode_threads": (1, 0),
    "threads": (0, -1),
}
MOST: Limits = {
    "latency_ms": (MAX_LATENCY_MS, MAX_LATENCY_MS + 1),
    "batch_size": (4096, 4097),
    "decode_threads": (64, 65),
    "threads": (1024, 1025),
}


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(TokenAdaptSettings, name, within, beyond)


@pytest.mark.parametrize(("name", "value"), [("algorithm", "greedy"), ("use_gammas", "0,two"), ("use_gammas", "0,")])
def test_other_words_are_refused(name: str, value: str) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}: got '{value}'"):
        TokenAdaptSettings(**given)


@pytest.mark.parametrize(("stated", "gammas"), [("", (-4, 0, 2)), ("2", (2,)), ("2, -4,2", (-4, 2))])
def test_gammas_are_listed_or_all(stated: str, gammas: tuple[int, ...]) -> None:
    assert TokenAdaptSettings(use_gammas=stated).gammas((-4, 0, 2)) == gammas


def test_an_image_comes_as_a_file_or_as_pixels_and_neither_must_be_given() -> None:
    """A request for DESCRIPTION has no input."""
    assert {one.name: (one.data_type, one.dims, one.optional) for one in signature({}).inputs} == {
        "IMAGE": ("TYPE_STRING", (1,), True),
        "PIXELS": ("TYPE_UINT8", (-1, -1, 3), True),
    }
    assert {one.name: one.dims for one in signature({}).outputs}["PROBABILITIES"] == (-1,)
