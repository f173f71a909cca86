"""The checks that policies declare for their fields, and settings read from strings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest

from shapeshift import settings
from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import Check, OptionalField, Policy, integer, list_of, number, one_of
from shapeshift.settings import require


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (number(), [0, -1, 2.5, 1e308], [True, False, math.nan, math.inf, -math.inf, "1", None, [], {}, 10**400]),
        (number(minimum=0), [0, 0.0, 1], [-1e-9, -1, True]),
        (number(maximum=1), [1, -5], [1.0001]),
        (number(above=0), [1e-300], [0, -0.0, -1]),
        (integer(), [0, -(2**70), 2**70], [1.0, 0.5, True, "1", None, math.nan]),
        (integer(minimum=1, maximum=3), [1, 2, 3], [0, 4, 2.0]),
        (list_of(integer()), [[], [1, 2]], [(1,), "12", None, {}, [1, "2"], [[1]]]),
        (list_of(integer(), min_length=2), [[1, 2]], [[], [1]]),
        (list_of(list_of(number())), [[[1.5], []]], [[1], [["a"]]]),
        (one_of("a", "b"), ["a", "b"], ["c", "A", "", None, 1, ["a"], {}]),
    ],
)
def test_checks(check: Check, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert check("field", value) == value
    for value in bad:
        with pytest.raises(InvalidInputError, match="^field"):
            check("field", value)


def test_numbers_become_floats() -> None:
    assert isinstance(number()("field", 3), float)


def test_an_item_of_a_list_is_named_by_its_place() -> None:
    with pytest.raises(InvalidInputError) as caught:
        list_of(list_of(integer(minimum=0)))("field", [[1], [2, -1]])
    assert caught.value.field == "field[1][1]"
    assert str(caught.value) == "field[1][1]: got -1; a whole number at least 0"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidInputError) as caught:
        number()("field", "x" * 10_000)
    assert len(str(caught.value)) < 150


def test_optional_fields_have_defaults_and_are_checked_when_given() -> None:
    policy = Policy("p", "s", lambda a, b: {"a": a, "b": b}, {"a": integer(), "b": OptionalField(integer(), None)})
    assert policy.evaluate({"a": 1}) == {"a": 1, "b": None}
    assert policy.evaluate({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(InvalidInputError, match="b: got None"):
        policy.evaluate({"a": 1, "b": None})


def test_without_algorithms_none_may_be_named() -> None:
    policy = Policy("p", "s", lambda a: {"a": a}, {"a": integer()})
    assert policy.evaluate({"a": 1}) == {"a": 1}
    with pytest.raises(InvalidInputError, match="algorithm: .*unknown key"):
        policy.evaluate({"a": 1, "algorithm": "x"})


@pytest.mark.parametrize("error", [ValueError("is odd"), OverflowError("is large")])
def test_an_error_of_the_function_is_an_input_error(error: Exception) -> None:
    def refuse(a: int) -> dict[str, Any]:
        raise error

    with pytest.raises(InvalidInputError, match=f"input: .*{error}"):
        Policy("p", "s", refuse, {"a": integer()}).evaluate({"a": 1})


@dataclass(frozen=True)
class Example:
    needed: str
    count: int = 3
    share: float = 0.5
    flag: bool = False
    limit: int | None = None
    place: str | None = None

    def __post_init__(self) -> None:
        require(self.count >= 0, "count", self.count, "0 or more")


def test_settings_from_strings() -> None:
    assert settings.read(Example, {"needed": "x"}) == Example("x")
    values = {"needed": "", "count": "7", "share": "1e-3", "flag": "TRUE", "limit": "9", "place": "here", "other": "?"}
    assert settings.read(Example, values) == Example("", 7, 1e-3, True, 9, "here")
    assert settings.read(Example, {"needed": "x", "limit": "", "place": ""}) == Example("x")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "needed: got None; this parameter is required"),
        ({"needed": "x", "count": "3.5"}, "count: got '3.5'; must be a whole number"),
        ({"needed": "x", "count": ""}, "count: got ''; must be a whole number"),
        ({"needed": "x", "share": "half"}, "share: got 'half'; must be a number"),
        ({"needed": "x", "flag": "1"}, "flag: got '1'; must be true or false"),
        ({"needed": "x", "flag": "yes"}, "flag: got 'yes'"),
        ({"needed": "x", "limit": "none"}, "limit: got 'none'; must be a whole number"),
        ({"needed": "x", "count": "-1"}, "count: got -1; 0 or more"),
    ],
)
def test_settings_refuse(values: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        settings.read(Example, values)
    assert str(caught.value).startswith(said)


def test_unknown_settings_are_refused_by_name() -> None:
    known = settings.names(Example)
    assert known == {"needed", "count", "share", "flag", "limit", "place"}
    settings.refuse_unknown(["count", "flag"], known)
    with pytest.raises(InvalidInputError, match="counts: .*; did you mean count. known: count, flag, limit"):
        settings.refuse_unknown({"count": "1", "counts": "2"}, known)


def test_a_setting_that_is_gone_is_refused_with_what_to_write_instead() -> None:
    name, instead = next(iter(settings.REMOVED.items()))
    with pytest.raises(InvalidInputError, match=rf"{name}: .*this setting is gone: {re.escape(instead)}"):
        settings.refuse_unknown([name], settings.names(Example))
