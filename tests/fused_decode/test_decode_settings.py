"""The ranges of the parameters of a model that generates, and of one that forwards to it."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.settings import MOST_DRAFTED, ForwardSettings, FusedDecodeSettings, signature
from tests.limits import Limits, cases, require_limit

LEAST: Limits = {
    "max_concurrency": (1, 0),
    "max_length": (2, 1),
    "prefill_tokens": (1, 0),
    "num_speculative_tokens": (0, -1),
    "queue_requests": (1, 0),
    "threads": (0, -1),
    "tensor_parallel_size": (1, 0),
    "memory_mb": (0, -1),
    "slo_ms": (0.0, -0.01),
    "group_size": (0, 1),
}
MOST: Limits = {
    "max_concurrency": (4096, 4097),
    "max_length": (1048576, 1048577),
    "num_speculative_tokens": (MOST_DRAFTED, MOST_DRAFTED + 1),
    "threads": (1024, 1025),
    "tensor_parallel_size": (64, 65),
}
FORWARDED: tuple[Limits, ...] = (
    {"forward_timeout_s": (0.01, 0.0)},
    {"forward_timeout_s": (86400.0, 86400.5)},
)


def made(**given: Any) -> FusedDecodeSettings:
    return FusedDecodeSettings("checkpoint", **given)


def forwarding(**given: Any) -> ForwardSettings:
    return ForwardSettings("generate", **given)


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(made, name, within, beyond)


@pytest.mark.parametrize(("name", "within", "beyond"), cases(*FORWARDED))
def test_a_parameter_of_forwarding_is_taken_to_its_limit_and_not_beyond(
    name: str, within: float, beyond: float
) -> None:
    require_limit(forwarding, name, within, beyond)


@pytest.mark.parametrize(("tokens", "taken"), [(0, True), (99, False), (100, True), (101, True)])
def test_the_cache_holds_at_least_one_text(tokens: int, taken: bool) -> None:
    if taken:
        assert made(max_length=100, kv_cache_tokens=tokens).kv_cache_tokens == tokens
        return
    with pytest.raises(InvalidInputError, match=r"^kv_cache_tokens: got 99; 0, or at least max_length \(100\)"):
        made(max_length=100, kv_cache_tokens=tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint", ""),
        ("precision", "f64"),
        ("kv_precision", "int4"),
        ("slo_classes", "a,b"),
        ("slo_classes", "*,a,*"),
        ("slo_classes", "a,*,a"),
    ],
)
def test_other_words_are_refused(name: str, value: str) -> None:
    given: dict[str, Any] = {"checkpoint": "a", name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}: got "):
        FusedDecodeSettings(**given)


def test_classes_are_names_without_the_spaces_around_them() -> None:
    assert made(slo_classes="a, *,b ").classes == ["a", "*", "b"]


def test_a_model_that_forwards_names_the_other_one() -> None:
    with pytest.raises(InvalidInputError, match="^forward_to: got ''"):
        ForwardSettings("")


@pytest.mark.parametrize(("parameters", "decoupled"), [({}, True), ({"forward_to": "generate"}, False)])
def test_a_model_that_generates_is_decoupled_and_takes_no_batches(parameters: dict[str, str], decoupled: bool) -> None:
    found = signature(parameters)
    assert (found.decoupled, found.max_batch_size) == (decoupled, 0)
