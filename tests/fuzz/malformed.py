"""Hypothesis strategies of malformed requests, made from what a front declares.

Each request is malformed by construction: it is one that the front answers, with one fault.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.declarations import Declaration, Declared, Request, Tensor

_DATATYPES = ("BOOL", "INT8", "INT32", "INT64", "UINT8", "UINT32", "FP16", "FP32", "FP64", "BYTES")
_BAD_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"ok \xf0\x9f\x98")
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
_unknown = _words.map(lambda word: f"x_{word}")


def _beyond(least: float, most: float) -> SearchStrategy[float]:
    """Numbers that 32 bits hold outside of [least, most], and what is no number."""
    below = st.floats(-1e36, -1e-3).map(lambda by: least + by)
    above = st.floats(1e-3, 1e36).map(lambda by: most + max(by, most * 1e-3))
    return below | above | st.sampled_from(_NOT_FINITE)


def _whole_outside(least: int, most: int, bits: int) -> SearchStrategy[int]:
    edge = 2 ** (bits - 1)
    below = st.integers(-edge, least - 1)
    return below if most >= edge - 1 else below | st.integers(most + 1, edge - 1)


# Values that a front refuses, one list of values for one input, by the input's name.
_VALUES: dict[str, SearchStrategy[list[Any]]] = {
    "TEXT": st.sampled_from([[""], *([bytes(bad)] for bad in _BAD_UTF8)]),
    "INPUT_IDS": st.lists(_whole_outside(0, 10**6, 64), min_size=1, max_size=4),
    "IMAGE": st.binary(max_size=40).map(lambda content: [b"no image" + content]),
    "max_tokens": _whole_outside(1, 2**31, 32).map(lambda value: [value]),
    "temperature": _beyond(0.0, 1e30).map(lambda value: [value]),
    "top_k": _whole_outside(-1, 10**6, 32).map(lambda value: [value]),
    "top_p": _beyond(0.0, 1.0).map(lambda value: [value]),
    "min_p": _beyond(0.0, 1.0).map(lambda value: [value]),
    "repetition_penalty": _beyond(0.0, 1e30).map(lambda value: [value]),
    "stop": st.sampled_from([[""], ["s" * 257], ["s"] * 17, *([bytes(bad)] for bad in _BAD_UTF8)]),
    "stop_id": _words.map(lambda word: [word]),
}
_SAMPLING = st.one_of(
    _unknown.map(lambda key: json.dumps({key: 1})),
    st.sampled_from(["top_p", "min_p"]).flatmap(lambda key: _beyond(0.0, 1.0).map(lambda v: json.dumps({key: v}))),
    st.sampled_from(["max_tokens", "seed", "ignore_eos"]).map(lambda key: json.dumps({key: [1, 2]})),
    st.sampled_from(["[1]", "3", '"x"', "{", '{"top_p":}', "nul", "{" * 200, "\\ud800"]),
    _words.map(lambda word: f"[{word}"),
)
_COMMON: SearchStrategy[dict[str, Any]] = st.one_of(
    _unknown.map(lambda name: {name: 1}),
    _words.map(lambda word: {f"x{word}": word}),
    st.one_of(st.floats(max_value=0.0, allow_nan=False), st.sampled_from(["soon", "nan", "", "-1", True])).map(
        lambda value: {"latency_ms": value}
    ),
    st.sampled_from(["much", "inf", "nan", False]).map(lambda value: {"utility": value}),
    st.sampled_from(["", "s" * 257, 3, True]).map(lambda value: {"slo_class": value}),
    st.sampled_from(["", "t" * 1000, 7, False]).map(lambda value: {"request_tag": value}),
)


def requests(front: Declaration) -> SearchStrategy[Request]:
    """Malformed requests to `front` as tensors, for gRPC and HTTP."""
    return st.one_of(*_kinds(front))


def _kinds(front: Declaration) -> Iterator[SearchStrategy[Request]]:
    valid = front.valid
    present = st.sampled_from(valid.inputs)
    yield present.flatmap(
        lambda one: st.sampled_from([kind for kind in _DATATYPES if kind != one.datatype]).map(
            lambda kind: valid.with_input(_retyped(one, kind), "datatype")
        )
    )
    yield st.tuples(present, st.sampled_from(["rank", "more", "none", "negative", "huge"])).map(
        lambda drawn: valid.with_input(_reshaped(*drawn), f"shape: {drawn[1]}")
    )
    yield st.tuples(present, _unknown).map(
        lambda drawn: replace(valid, inputs=(*valid.inputs, replace(drawn[0], name=drawn[1])), fault="unknown input")
    )
    yield present.map(lambda one: replace(valid, inputs=(*valid.inputs, one), fault="input twice"))
    yield st.just(replace(valid, inputs=valid.inputs[1:], fault="input missing"))
    yield _unknown.map(lambda name: replace(valid, outputs=(name,), fault="unknown output"))
    yield _COMMON.map(lambda given: replace(valid, parameters={**valid.parameters, **given}, fault="parameter"))
    yield st.sampled_from(["2", "0", "-1", "one", "9" * 30]).map(
        lambda version: replace(valid, version=version, fault="version")
    )
    yield st.tuples(present, st.binary(max_size=3), st.booleans()).map(
        lambda drawn: valid.with_input(_garbled(*drawn), "content")
    )
    for one in front.inputs:
        if one.name in _VALUES:
            yield _values(front, one)
    if (one_more := front.input("sampling_parameters")) is not None:
        yield _SAMPLING.map(lambda text: valid.with_input(front.tensor(one_more, [text]), "sampling_parameters"))


def _values(front: Declaration, one: Declared) -> SearchStrategy[Request]:
    valid, fault = front.valid, f"value of {one.name}"
    if one.name in ("INPUT_IDS", "IMAGE"):
        # In place of the input that the valid request has.
        valid = replace(valid, inputs=())
    mask = front.input("ATTENTION_MASK") if one.name == "INPUT_IDS" else None

    def make(values: list[Any]) -> Request:
        made = valid.with_input(front.tensor(one, values), fault)
        return made if mask is None else made.with_input(front.tensor(mask, [1] * len(values)), fault)

    return _VALUES[one.name].map(make)


def _retyped(one: Tensor, kind: str) -> Tensor:
    values = ["1"] * len(one.values) if kind == "BYTES" else [1] * len(one.values)
    return replace(one, datatype=kind, values=tuple(values))


def _reshaped(one: Tensor, how: str) -> Tensor:
    values, shape = one.values, one.shape
    if how == "rank":
        return replace(one, shape=(1, *shape, 1))
    if how == "more":
        # Two values where one is declared, in the last dimension.
        return replace(one, shape=(*shape[:-1], 2 * shape[-1]), values=values * 2)
    if how == "none":
        return replace(one, shape=(*shape[:-1], 0), values=())
    if how == "negative":
        return replace(one, shape=(*shape[:-1], -1))
    # For a type of fixed size Triton allocates over HTTP what the shape claims: gigabytes would end the server.
    return replace(one, shape=(*shape[:-1], 2**31 if one.datatype == "BYTES" else 2**20))


def _garbled(one: Tensor, extra: bytes, cut: bool) -> Tensor:
    """Its content with bytes too few or too many."""
    whole = one.raw if one.raw is not None else encoded(one)
    return replace(one, raw=whole[: len(whole) - 1 - len(extra)] if cut else whole + b"\x7f" + extra)


def encoded(one: Tensor) -> bytes:
    """The content of a tensor in the binary form of the protocol."""
    if one.datatype == "BYTES":
        texts = [value if isinstance(value, bytes) else str(value).encode("utf-8") for value in one.values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    codes = {"BOOL": "?", "INT8": "b", "UINT8": "B", "INT32": "i", "UINT32": "I", "INT64": "q", "FP16": "e"}
    codes |= {"FP32": "f", "FP64": "d"}
    return struct.pack(f"<{len(one.values)}{codes[one.datatype]}", *one.values)


def bodies(front: Declaration) -> SearchStrategy[tuple[str, bytes]]:
    """Malformed bodies for the generate extension, each with its fault."""
    valid: dict[str, Any] = {one.name: one.values[0] for one in front.valid.inputs}
    named = {name: values for name, values in _VALUES.items() if front.input(name) and name != "stop_id"}
    others = st.sampled_from([None, [], {}, [[1]], {"a": 1}, "", "x", True, 1e400, -1])
    flags = [one.name for one in front.inputs if one.datatype == "BOOL"]
    made = [
        _COMMON.map(lambda given: ("parameter", {**valid, **given})),
        st.sampled_from(["max_tokens", "temperature", "top_k"]).flatmap(
            lambda name: st.sampled_from([[], {}, "x", "", [1, 2], {"a": 1}]).map(
                lambda value: (f"type of {name}", {**valid, name: value})
            )
        ),
        st.sampled_from(flags).flatmap(
            lambda name: st.sampled_from([3, "yes", {}, "", -1.5]).map(
                lambda value: (f"type of {name}", {**valid, name: value})
            )
        ),
        st.tuples(_unknown, others).map(lambda drawn: ("unknown key", {**valid, drawn[0]: drawn[1]})),
        _SAMPLING.map(lambda text: ("sampling_parameters", {**valid, "sampling_parameters": text})),
        *(_valued(valid, name, values) for name, values in named.items() if name != "stop"),
    ]
    objects = st.one_of(*made).map(lambda drawn: (drawn[0], json.dumps(drawn[1]).encode()))
    whole = json.dumps(valid).encode()
    cut = st.integers(1, len(whole) - 1).map(lambda end: ("cut short", whole[:end]))
    garbage = st.binary(min_size=1, max_size=60).map(lambda content: ("bytes", b"\x00" + content))
    scalars = st.sampled_from(["[]", "1", '"x"', "null", "[{}]", "", "{}", "{]", '{"text_input":}']).map(
        lambda text: ("no object with inputs", text.encode())
    )
    return objects | cut | garbage | scalars


def _valued(
    valid: dict[str, Any], name: str, values: SearchStrategy[list[Any]]
) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    return values.filter(_fits_json).map(lambda found: (f"value of {name}", {**valid, name: found[0]}))


def _fits_json(values: list[Any]) -> bool:
    return not isinstance(values[0], bytes)
