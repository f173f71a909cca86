"""The text of a request, and what Triton tells a backend about its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from shapeshift.engines.text.tokenizer import CONFIG, FILE_NAME, PADS, TextTokenizer
from shapeshift.errors import InvalidInputError
from shapeshift.serving import model_args
from shapeshift.serving.text_inputs import Tokenizer, rows_of_request
from tests.fakes import PbUtils, Request, ids_request, text_request

VOCABULARY = 100
MAX_TOKENS = 6


class Letters:
    """One token a letter."""

    max_tokens = MAX_TOKENS

    def encode(self, text: bytes, row: int, truncate: bool, prompt: str) -> np.ndarray:
        assert isinstance(text, bytes)
        if len(text) > MAX_TOKENS and not truncate:
            raise InvalidInputError("TEXT", f"{len(text)} tokens", "too long", row)
        return np.frombuffer(text[:MAX_TOKENS], np.uint8).astype(np.int64)

    def padded(self, ids: np.ndarray) -> np.ndarray:
        return ids


LETTERS = cast(Tokenizer, Letters())


def rows(request: Request, truncate: bool = False) -> list[list[int]]:
    made = rows_of_request(PbUtils(), request, LETTERS, VOCABULARY, truncate).ids
    assert all(row.dtype == np.int64 and row.ndim == 1 for row in made)
    return [row.tolist() for row in made]


def test_texts() -> None:
    assert rows(text_request("ab", "c")) == [[97, 98], [99]]
    assert rows(Request(TEXT=np.array([["a"], ["b"]], dtype=object))) == [[97], [98]]


def test_ids_without_their_padding() -> None:
    assert rows(ids_request([1, 2, 3], [4])) == [[1, 2, 3], [4]]
    assert rows(ids_request([0, 99])) == [[0, 99]]


def test_ids_of_a_model_that_reads_padding_are_filled_up(tmp_path: Path) -> None:
    """As those of SigLIP, whose library pads every text to its full length and gives no mask."""
    tokenizer = Library(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    for side, expected in (("right", [1, 1, 0, 0]), ("left", [0, 0, 1, 1])):
        tokenizer.enable_padding(length=4, pad_id=0, pad_token="<pad>", direction=side)
        tokenizer.save(str(tmp_path / FILE_NAME))
        (tmp_path / CONFIG).write_text(json.dumps({PADS: True}))
        reads, request = TextTokenizer(tmp_path / FILE_NAME, 4), ids_request([1, 1], [1, 1, 1, 1])
        made = rows_of_request(PbUtils(), request, reads, 2, False).ids
        assert [row.tolist() for row in made] == [expected, [1, 1, 1, 1]]


def test_ids_are_copied_out_of_tritons_buffer() -> None:
    request = ids_request([1, 2])
    (row,) = rows_of_request(PbUtils(), request, LETTERS, VOCABULARY, False).ids
    request.tensors["INPUT_IDS"].as_numpy()[:] = 77
    assert row.tolist() == [1, 2]


def test_truncate() -> None:
    assert rows(text_request("abcdefgh"), truncate=True) == [[97, 98, 99, 100, 101, 102]]
    assert rows(ids_request(range(1, 10), [5]), truncate=True) == [[1, 2, 3, 4, 5, 6], [5]]


def tensors(**values: Any) -> Request:
    arrays: dict[str, Any] = {name: np.array(value, dtype=np.int64) for name, value in values.items()}
    return Request(**arrays)


def both() -> Request:
    request = text_request("a")
    request.tensors.update(ids_request([1]).tensors)
    return request


BAD: dict[str, tuple[Request, str]] = {
    "nothing": (Request(), "inputs: got 'none'; TEXT, or INPUT_IDS with ATTENTION_MASK"),
    "mask alone": (tensors(ATTENTION_MASK=[[1]]), "inputs: got 'none'"),
    "ids alone": (tensors(INPUT_IDS=[[1]]), "ATTENTION_MASK: got None; given beside INPUT_IDS"),
    "both": (both(), "inputs: got 'TEXT and INPUT_IDS'; one of the two kinds, not both"),
    "no row": (Request(TEXT=np.empty((0, 1), object)), "TEXT: got [0, 1]; shape [n, 1] with n at least 1"),
    "two columns": (Request(TEXT=np.empty((1, 2), object)), "TEXT: got [1, 2]; shape [n, 1]"),
    "no axis": (Request(TEXT=np.empty(1, object)), "TEXT: got [1]; shape [n, 1]"),
    "a text too long": (text_request("a", "abcdefg"), "row 1: TEXT: got '7 tokens'; too long"),
    "not a text": (Request(TEXT=np.array([[b"a"], [5]], object)), "row 1: TEXT: got 'int'; a text"),
    "no rows of ids": (
        tensors(INPUT_IDS=np.empty((0, 3)), ATTENTION_MASK=np.empty((0, 3))),
        "INPUT_IDS: got [0, 3]; shape [n, length] with n at least 1",
    ),
    "ids without rows": (tensors(INPUT_IDS=[1], ATTENTION_MASK=[1]), "INPUT_IDS: got [1]; shape [n, length]"),
    "mask of another shape": (
        tensors(INPUT_IDS=[[1, 2]], ATTENTION_MASK=[[1]]),
        "ATTENTION_MASK: got [1, 1]; the shape of INPUT_IDS, [1, 2]",
    ),
    "hole": (
        tensors(INPUT_IDS=[[1, 2, 3]] * 2, ATTENTION_MASK=[[1, 1, 1], [1, 0, 1]]),
        "row 1: ATTENTION_MASK: got [1, 0, 1]; ones, then zeros",
    ),
    "padding first": (
        tensors(INPUT_IDS=[[1, 2]], ATTENTION_MASK=[[0, 1]]),
        "row 0: ATTENTION_MASK: got [0, 1]; ones, then zeros",
    ),
    "other numbers": (
        tensors(INPUT_IDS=[[1, 2]], ATTENTION_MASK=[[2, 0]]),
        "row 0: ATTENTION_MASK: got [2, 0]; ones, then zeros",
    ),
    "below zero": (
        tensors(INPUT_IDS=[[1, 2]], ATTENTION_MASK=[[-1, 1]]),
        "row 0: ATTENTION_MASK: got [-1, 1]; ones, then zeros",
    ),
    "sums that wrap": (
        tensors(INPUT_IDS=[[1] * 4], ATTENTION_MASK=[[2**62] * 4]),
        "row 0: ATTENTION_MASK: got [4611686018427387904,",
    ),
    "all zeros": (
        tensors(INPUT_IDS=[[1], [2]], ATTENTION_MASK=[[1], [0]]),
        "row 1: ATTENTION_MASK: got 'all zeros'; at least one token",
    ),
    "no columns": (
        tensors(INPUT_IDS=np.empty((1, 0)), ATTENTION_MASK=np.empty((1, 0))),
        "row 0: ATTENTION_MASK: got 'all zeros'; at least one token",
    ),
    "too many": (
        ids_request([1], range(1, 8)),
        "row 1: INPUT_IDS: got '7 tokens'; at most 6 (or truncate=true)",
    ),
    "id too large": (ids_request([1], [2, 100]), "row 1: INPUT_IDS: got 100; 0 to 99"),
    "id below 0": (ids_request([1, -1]), "row 0: INPUT_IDS: got -1; 0 to 99"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_meant_is_named(kind: str) -> None:
    request, said = BAD[kind]
    with pytest.raises(InvalidInputError) as caught:
        rows(request)
    assert str(caught.value).startswith(said)


def test_ids_under_the_mask_may_be_anything() -> None:
    request = tensors(INPUT_IDS=[[1, 2, -9, 10**9]], ATTENTION_MASK=[[1, 1, 0, 0]])
    assert rows(request) == [[1, 2]]


def test_model_args() -> None:
    config = {
        "max_batch_size": 64,
        "output": [{"name": "EMBEDDING"}, {"name": "LOGITS"}, {"name": "DESCRIPTION"}],
        "parameters": {"checkpoint": {"string_value": "x"}},
    }
    args = {
        "model_config": json.dumps(config),
        "model_name": "encode",
        "model_repository": "/somewhere/encode",
        "model_version": "2",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    made = model_args.read(args)
    assert (made.name, made.folder, made.kind, made.device_id) == ("encode", Path("/somewhere/encode"), "CPU", 0)
    assert made.parameters == {"checkpoint": "x"}
    assert made.outputs == ["EMBEDDING", "LOGITS"]
    assert (made.max_batch_size, made.version) == (64, "2")
    del config["parameters"]
    bare = model_args.read({**args, "model_config": json.dumps(config), "model_instance_device_id": ""})
    assert (bare.parameters, bare.device_id) == ({}, 0)
