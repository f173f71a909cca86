"""Values that a front refuses, by the name of the input: what its check lets pass is not among them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Values = SearchStrategy[list[Any]]
BAD_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"ok \xf0\x9f\x98")
_NOT_FINITE = (math.nan, math.inf, -math.inf)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
unknown = words.map(lambda word: f"x_{word}")
# Not a JSON object, whatever it should hold.
_no_object = st.sampled_from(["", "[1]", "3", '"x"', "null", "{", '{"a":}', "nul", "{" * 200, "\\ud800", '{"a":1}}'])


def beyond(least: float, most: float) -> SearchStrategy[float]:
    """Numbers that 32 bits hold outside of [least, most], and what is no number."""
    below = st.floats(-1e36, -1e-3).map(lambda by: least + by)
    above = st.floats(1e-3, 1e36).map(lambda by: most + max(by, most * 1e-3))
    return below | above | st.sampled_from(_NOT_FINITE)


def whole_outside(least: int, most: int, bits: int = 32) -> SearchStrategy[int]:
    """Whole numbers of so many bits outside of [least, most]."""
    edge = 2 ** (bits - 1)
    below = st.integers(-edge, least - 1)
    return below if most >= edge - 1 else below | st.integers(most + 1, edge - 1)


def _one(values: SearchStrategy[Any]) -> Values:
    return values.map(lambda value: [value])


def _texts(most: int) -> Values:
    """Lists that no input of texts takes, each of 1 to 256 characters and at most `most` of them."""
    return st.sampled_from([[""], ["a", ""], ["s" * 257], ["s"] * (most + 1), *([bad] for bad in BAD_UTF8)])


_ids = whole_outside(0, 10**6)
_bias = beyond(-100.0, 100.0).map(lambda value: {"7": value})
_biases = st.one_of(
    _bias,
    whole_outside(0, 10**6, 64).map(lambda token: {str(token): 1}),
    words.filter(lambda word: not word.strip().lstrip("+-").isdecimal()).map(lambda word: {f"x{word}": 1}),
    st.sampled_from([{"7": "x"}, {"7": []}, {"7": None}, {"7": True}, {"1.5": 1}, {"": 1}, {"nan": 1}]),
    st.just({str(token): 1 for token in range(1025)}),
)


def _structures() -> Iterator[Any]:
    """Objects that are no `structured_outputs`; some have the right form, and only compiling them shows it."""
    contents: Mapping[str, tuple[Any, ...]] = {
        "regex": ("(", "[", "a{2", "*", "a" * 65537, "(?<=a)b", 3, [], {}, True),
        "json": ({"type": "nothing"}, "{", "x", 3, [], {"$ref": "#/nowhere"}, {"type": 5}),
        "choice": ([], [""], [3], "a", {}, ["s" * 257], [["a"]]),
        "grammar": ("", "root ::= x", "::=", "a" * 65537, 'root ::= "', 3, []),
    }
    yield from ({kind: content} for kind, found in contents.items() for content in found)
    yield from ({}, {"regex": "a", "choice": ["a"]}, {"json_object": False}, {"disable_any_whitespace": True})
    yield {"regex": "a", "disable_any_whitespace": 3}


_grammars = st.sampled_from(list(_structures())) | unknown.map(lambda key: {key: "a"})
_either = st.sampled_from(["x", "", "True", "0", "never ever", b"\xff"])
VALUES: Mapping[str, Values] = {
    "TEXT": st.sampled_from([[""], *([bad] for bad in BAD_UTF8)]),
    "INPUT_IDS": st.lists(whole_outside(0, 10**6, 64), min_size=1, max_size=4),
    "ATTENTION_MASK": st.lists(whole_outside(0, 1, 64), min_size=1, max_size=4),
    "IMAGE": _one(st.binary(max_size=40).map(lambda content: b"no image" + content)),
    "text_input": st.sampled_from([[""], [], ["a"] * 65, ["a", ""], *([bad] for bad in BAD_UTF8)]),
    "input_ids": st.lists(_ids, min_size=1, max_size=4) | st.just([]),
    "input_lengths": st.lists(whole_outside(1, 2**31), min_size=1, max_size=4) | st.just([]),
    "n": _one(whole_outside(1, 128)),
    "best_of": _one(whole_outside(1, 128)),
    "num_beams": _one(whole_outside(1, 8)),
    "length_penalty": _one(beyond(-4.0, 4.0) | st.floats(1.5, 4.0)),
    "early_stopping": _one(_either | st.sampled_from(["true", "never"])),
    "num_return_sequences": _one(whole_outside(1, 1)),
    "min_tokens": _one(whole_outside(0, 2)),
    "max_tokens": _one(whole_outside(1, 2**31)),
    "temperature": _one(beyond(0.0, 1e30)),
    "top_k": _one(whole_outside(-1, 10**6)),
    "top_p": _one(beyond(0.0, 1.0)),
    "min_p": _one(beyond(0.0, 1.0)),
    "repetition_penalty": _one(beyond(0.0, 1e30)),
    "presence_penalty": _one(beyond(-2.0, 2.0)),
    "frequency_penalty": _one(beyond(-2.0, 2.0)),
    "logit_bias": _one(_no_object | _biases.map(json.dumps)),
    "bad_words": _texts(64),
    "stop": _texts(16),
    "stop_token_ids": st.lists(_ids, min_size=1, max_size=4) | st.just([1] * 65),
    "structured_outputs": _one(_no_object | _grammars.map(json.dumps)),
    "logprobs": _one(whole_outside(0, 20)),
    "prompt_logprobs": _one(whole_outside(0, 20)),
    "stop_id": _one(words),
}
"""One list of values for one input. The others take every value of their type: flags, `seed`, PIXELS."""

_keyed = ["top_p", "min_p"]
_numbered = ["max_tokens", "seed", "ignore_eos", "n", "best_of", "num_beams", "top_k", "logprobs", "temperature"]
SAMPLING: SearchStrategy[str] = st.one_of(
    unknown.map(lambda key: json.dumps({key: 1})),
    st.sampled_from(_keyed).flatmap(lambda key: beyond(0.0, 1.0).map(lambda value: json.dumps({key: value}))),
    st.sampled_from(_numbered).flatmap(
        lambda key: st.sampled_from([[1, 2], {}, "x", [[]], 1.5e300]).map(lambda value: json.dumps({key: value}))
    ),
    st.sampled_from(["stop", "bad_words", "stop_token_ids"]).flatmap(
        lambda key: st.sampled_from([[[]], [{}], {}, 3, [1.5], [None]]).map(lambda value: json.dumps({key: value}))
    ),
    _biases.map(lambda given: json.dumps({"logit_bias": given})),
    _grammars.map(lambda given: json.dumps({"structured_outputs": given})),
    # Without the empty text, which says nothing.
    _no_object.filter(bool),
    words.map(lambda word: f"[{word}"),
)
"""Contents of the input `sampling_parameters` that are refused."""
