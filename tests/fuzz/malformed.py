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
from tests.fuzz.values import SAMPLING, VALUES, unknown, words

_DATATYPES = ("BOOL", "INT8", "INT32", "INT64", "UINT8", "UINT32", "FP16", "FP32", "FP64", "BYTES")
_RESHAPED = ("rank", "none", "negative", "huge")
# Which input of the valid request another one replaces, and which other one that needs.
_INSTEAD = {"INPUT_IDS": "TEXT", "ATTENTION_MASK": "TEXT", "IMAGE": "PIXELS"}
_INSTEAD |= {"input_ids": "text_input", "input_lengths": "text_input"}
_BESIDE = {"INPUT_IDS": "ATTENTION_MASK", "ATTENTION_MASK": "INPUT_IDS", "input_lengths": "input_ids"}
_COMMON: SearchStrategy[dict[str, Any]] = st.one_of(
    unknown.map(lambda name: {name: 1}),
    words.map(lambda word: {f"x{word}": word}),
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
    yield st.tuples(present, st.sampled_from(_RESHAPED)).map(
        lambda drawn: valid.with_input(_reshaped(*drawn), f"shape: {drawn[1]}")
    )
    # Where one value is declared, several are a fault.
    single = [one for one in valid.inputs if _declared(front, one).dims[-1] > 0]
    yield st.sampled_from(single).map(lambda one: valid.with_input(_reshaped(one, "more"), "shape: more"))
    yield st.tuples(present, unknown).map(
        lambda drawn: replace(valid, inputs=(*valid.inputs, replace(drawn[0], name=drawn[1])), fault="unknown input")
    )
    yield present.map(lambda one: replace(valid, inputs=(*valid.inputs, one), fault="input twice"))
    yield st.just(replace(valid, inputs=valid.inputs[1:], fault="input missing"))
    yield unknown.map(lambda name: replace(valid, outputs=(name,), fault="unknown output"))
    yield _COMMON.map(lambda given: replace(valid, parameters={**valid.parameters, **given}, fault="parameter"))
    yield st.sampled_from(["2", "0", "-1", "one", "9" * 30]).map(
        lambda version: replace(valid, version=version, fault="version")
    )
    yield st.tuples(present, st.binary(max_size=3), st.booleans()).map(
        lambda drawn: valid.with_input(_garbled(*drawn), "content")
    )
    for one in front.inputs:
        if one.name in VALUES:
            yield _values(front, one)
    if (one_more := front.input("sampling_parameters")) is not None:
        yield SAMPLING.map(lambda text: valid.with_input(front.tensor(one_more, [text]), "sampling_parameters"))


def _values(front: Declaration, one: Declared) -> SearchStrategy[Request]:
    valid, fault = front.valid, f"value of {one.name}"
    kept = tuple(given for given in valid.inputs if given.name != _INSTEAD.get(one.name))
    other = front.input(_BESIDE[one.name]) if one.name in _BESIDE else None

    def make(values: list[Any]) -> Request:
        made = replace(valid, inputs=kept).with_input(front.tensor(one, values), fault)
        return made if other is None else made.with_input(front.tensor(other, [1] * max(len(values), 1)), fault)

    return VALUES[one.name].map(make)


def _declared(front: Declaration, one: Tensor) -> Declared:
    declared = front.input(one.name)
    assert declared is not None, one.name
    return declared


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
    named = {name: values for name, values in VALUES.items() if front.input(name) and name != "stop_id"}
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
        st.tuples(unknown, others).map(lambda drawn: ("unknown key", {**valid, drawn[0]: drawn[1]})),
        SAMPLING.map(lambda text: ("sampling_parameters", {**valid, "sampling_parameters": text})),
        *(_valued(valid, name, values) for name, values in named.items() if name != "stop"),
    ]
    objects = st.one_of(*made).map(lambda drawn: (drawn[0], json.dumps(drawn[1]).encode()))
    whole = json.dumps(valid).encode()
    cut = st.integers(1, len(whole) - 1).map(lambda end: ("cut short", whole[:end]))
    garbage = st.binary(min_size=1, max_size=60).map(lambda content: ("bytes", b"\x00" + content))
    scalars = st.sampled_from(["[]", "1", '"x"', "null", "[{}]", "{]", '{"text_input":}']).map(
        lambda text: ("no object with inputs", text.encode())
    )
    return objects | cut | garbage | scalars


def _valued(
    valid: dict[str, Any], name: str, values: SearchStrategy[list[Any]]
) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    return values.filter(_fits_json).map(lambda found: (f"value of {name}", {**valid, name: found[0]}))


def _fits_json(values: list[Any]) -> bool:
    """One value that JSON can hold."""
    return len(values) == 1 and not isinstance(values[0], bytes)
