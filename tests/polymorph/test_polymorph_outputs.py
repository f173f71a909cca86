"""Outputs beside EMBEDDING, and pairs of texts, from the front to the engines and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving import model_args
from tests.fakes import PbUtils, Request, TritonError, as_served, ids_request, text_request, values_of
from tests.polymorph.conftest import args_of

if TYPE_CHECKING:
    from tests.polymorph.conftest import Gate

OUTPUTS = """output [
  { name: "LOGITS" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "IMPORTANCE" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "OFFSETS" data_type: TYPE_INT32 dims: [ -1, 2 ] },
  { name: "ENGINE_MS" data_type: TYPE_FP32 dims: [ 1 ] }
]"""
ALL = ("LOGITS", "IMPORTANCE", "OFFSETS", "ENGINE_MS")


@pytest.fixture
def build(
    tmp_path: Path, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]
) -> Callable[..., Path]:
    """A function that builds a front with these outputs; returns the generated repository."""

    def make(outputs: str = OUTPUTS, pairs: bool = False, **parameters: object) -> Path:
        folder = add_front(
            tmp_path / "model_repository", "front", **{"engine_threads": 1, "bins": "16,64", **parameters}
        )
        text = (folder / "config.pbtxt").read_text()
        text = text.replace(text[text.index("output [") : text.index("instance_group")], outputs + "\n")
        if pairs:
            second = '{ name: "TEXT_PAIR" data_type: TYPE_STRING dims: [ 1 ] optional: true },\n  { name: "INPUT_IDS"'
            text = text.replace('{ name: "INPUT_IDS"', second)
        (folder / "config.pbtxt").write_text(text)
        return build_fronts(tmp_path / "model_repository", tmp_path / "build")

    return make


@pytest.fixture
def open_front(build: Callable[..., Path]) -> Iterator[Callable[..., TextFront]]:
    started: list[TextFront] = []

    def make(**choices: Any) -> TextFront:
        started.append(as_served(TextFront(PbUtils(), model_args.read(args_of(build(**choices) / "front")))))
        return started[-1]

    yield make
    for front in started:
        front.close()


def importance(ids: Any) -> np.ndarray:
    """What emulated engines make of ids."""
    return (np.asarray(ids) % 97 + 1).astype(np.float32)


def test_values_of_tokens_are_padded_to_the_longest_row_of_the_request(
    open_front: Callable[..., TextFront], gate: Gate
) -> None:
    front = open_front(pack_tokens=64)
    gate.hold()
    first = text_request("alone", outputs=ALL)
    front.execute([first])
    gate.wait_held()
    # These wait, and share one call with rows of one another.
    short, mixed = text_request("a", outputs=ALL), text_request("two words", "b", "c d e f", outputs=ALL)
    given = ids_request([101, 7, 8, 102], outputs=ALL)
    front.execute([short, mixed, given])
    gate.release()
    values = values_of(mixed.sender.answer())
    assert {name: value.shape for name, value in values.items()} == {
        "LOGITS": (3, 2),
        "IMPORTANCE": (3, 6),
        "OFFSETS": (3, 6, 2),
        "ENGINE_MS": (3, 1),
    }
    assert values["OFFSETS"].dtype == np.int32 and values["IMPORTANCE"].dtype == np.float32
    np.testing.assert_array_equal(values["OFFSETS"][0, :, 0], [-1, 0, 4, -1, -1, -1])
    np.testing.assert_array_equal(values["OFFSETS"][2, :, 1], [-1, 1, 3, 5, 7, -1])
    for row, length in enumerate((4, 3, 6)):
        assert (values["IMPORTANCE"][row, :length] > 0).all() and not values["IMPORTANCE"][row, length:].any()
    assert (values["ENGINE_MS"] > 0).all()
    assert short.vectors("IMPORTANCE").shape == (1, 3)
    # Ids have no text in which their tokens could stand.
    np.testing.assert_array_equal(given.vectors("IMPORTANCE"), [importance([101, 7, 8, 102])])
    assert (given.vectors("OFFSETS") == -1).all()
    assert max(gate.packs) > 1


def test_outputs_that_were_not_requested_are_not_sent(open_front: Callable[..., TextFront]) -> None:
    request = text_request("a", outputs=["LOGITS"])
    open_front().execute([request])
    assert list(values_of(request.sender.answer())) == ["LOGITS"]


def test_tokens_are_counted_for_who_asks(open_front: Callable[..., TextFront]) -> None:
    named = text_request("a", "is it so " * 200, outputs=["NUM_TOKENS", "LOGITS"], parameters={"truncate": True})
    # Triton lists all outputs for a request that names none.
    unnamed = text_request("a", outputs=[*ALL, "NUM_TOKENS", "DESCRIPTION"])
    ids = ids_request([101, 7, 102], [101, 102], outputs=["NUM_TOKENS"])
    front = open_front()
    front.execute([named, unnamed, ids])
    assert set(values_of(named.sender.answer())) == {"NUM_TOKENS", "LOGITS"}
    assert named.vectors("NUM_TOKENS").tolist() == [[3], [512]] and named.vectors("NUM_TOKENS").dtype == np.int32
    assert set(values_of(unnamed.sender.answer())) == {*ALL}
    assert ids.vectors("NUM_TOKENS").tolist() == [[3], [2]]


def test_texts_become_tokens_which_nothing_computes(open_front: Callable[..., TextFront]) -> None:
    request = text_request("is it", "is it so " * 200, outputs=["TOKENS"])
    wrong = text_request("", outputs=["TOKENS"])
    lone = ids_request([101, 102], outputs=["TOKENS"])
    front = open_front()
    front.execute([request, wrong, lone])
    short, long = (json.loads(row) for row in request.vectors("TOKENS")[:, 0])
    assert (short["tokens"][0], short["tokens"][-1], short["text"]) == ("[CLS]", "[SEP]", "is it")
    assert [short["text"][start:end] for start, end in short["offsets"][1:-1]] == ["is", "it"]
    assert short["special"] == [1, 0, 0, 1] and len(short["ids"]) == 4
    assert len(long["ids"]) > 512, "more than the model reads"
    assert "TEXT: got ''" in wrong.refusal()[1] and "one of the two" not in lone.refusal()[1]
    # Triton lists all outputs for a request that names none.
    unnamed = text_request("a", outputs=[*ALL, "NUM_TOKENS", "TOKENS", "DESCRIPTION"])
    front.execute([unnamed])
    assert set(values_of(unnamed.sender.answer())) == {*ALL}


def test_pairs(open_front: Callable[..., TextFront]) -> None:
    front = open_front(pairs=True)
    texts = np.array([[b"is it"], [b"x"]], dtype=object)
    request = Request(ALL, TEXT=texts, TEXT_PAIR=np.array([[b"yes"], [b"y z"]], dtype=object))
    single = Request(ALL, TEXT=texts)
    lone = Request(ALL, TEXT_PAIR=texts)
    uneven = Request(ALL, TEXT=texts, TEXT_PAIR=np.array([[b"yes"]], dtype=object))
    ids = ids_request([101, 102], outputs=ALL)
    ids.tensors["TEXT_PAIR"] = uneven.tensors["TEXT_PAIR"]
    asked = Request((*ALL, "DESCRIPTION"))
    front.execute([request, single, lone, uneven, ids, asked])
    np.testing.assert_array_equal(request.vectors("OFFSETS")[0, :, 0], [-1, 0, 3, -1, 0, -1])
    np.testing.assert_array_equal(request.vectors("OFFSETS")[1, :, 1], [-1, 1, -1, 1, 3, -1])
    assert request.vectors("LOGITS").shape == (2, 2) and single.vectors("IMPORTANCE").shape == (2, 4)
    for refused in (lone, uneven, ids):
        code, text = refused.refusal()
        assert code == TritonError.INVALID_ARG and "TEXT_PAIR" in text
    said = json.loads(asked.vectors("DESCRIPTION").item())
    assert (said["kind"], said["activation"], said["pairs"]) == ("text_classification", "softmax", True)
    assert "also" not in said and "only_pairs" not in said


@pytest.mark.parametrize(
    ("config", "pairs", "said"),
    [
        ({}, False, ("text_classification", None, None)),
        ({}, True, ("text_classification", ["reranking"], None)),
        (
            {"sbert_ce_default_activation_function": "torch.nn.Sigmoid"},
            True,
            ("reranking", ["text_classification"], True),
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, False, ("text_classification", None, None)),
    ],
)
def test_one_score_of_a_pair_ranks(
    open_front: Callable[..., TextFront],
    light_checkpoint: Path,
    tmp_path: Path,
    config: dict[str, Any],
    pairs: bool,
    said: tuple[Any, ...],
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(light_checkpoint, checkpoint)
    stated = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**stated, **config, "id2label": {"0": "score"}}))
    front = open_front(outputs='output [ { name: "LOGITS" } ]', pairs=pairs, checkpoint=checkpoint)
    asked = Request(("LOGITS", "DESCRIPTION"))
    front.execute([asked])
    found = json.loads(asked.vectors("DESCRIPTION").item())
    assert (found["kind"], found.get("also"), found.get("only_pairs")) == said
    assert (found["activation"], found["labels"]) == ("sigmoid", ["score"])


def test_a_worker_pads_to_the_longest_text_of_its_call(build: Callable[..., Path]) -> None:
    repository = build(placement="resident", workers=1)
    worker = TextWorker(PbUtils(), model_args.read(args_of(repository / "front_w00")))
    try:
        rows = [[101, 5, 102], [101, 6, 7, 8, 102]]
        ids = np.concatenate(rows)
        asked = Request(("LOGITS", "IMPORTANCE", "STATE"), INPUT_IDS=ids, LENGTHS=np.array([3, 5], dtype=np.int32))
        none = Request(("LOGITS", "IMPORTANCE", "STATE"), INPUT_IDS=ids[:0], LENGTHS=np.zeros(0, np.int32))
        full, empty = worker.execute([asked, none])
        values = values_of(full)
        assert values["LOGITS"].shape == (2, 2)
        np.testing.assert_array_equal(values["IMPORTANCE"][0], [*importance(rows[0]), 0, 0])
        np.testing.assert_array_equal(values["IMPORTANCE"][1], importance(rows[1]))
        assert values_of(empty)["IMPORTANCE"].shape[0] == 0 and values_of(empty)["LOGITS"].shape == (0, 2)
    finally:
        worker.close()


def test_rows_that_came_from_several_calls_are_put_together() -> None:
    ended: list[TextRequest] = []
    request = TextRequest([np.arange(2), np.arange(4)], ended.append)
    # The first row was computed beside a text of five tokens.
    request.complete(request.rows[0], {"IMPORTANCE": np.array([1.0, 2.0, 0, 0, 0])}, 1.5)
    request.complete(request.rows[1], {"IMPORTANCE": np.array([3.0, 4.0, 5.0, 6.0])}, 2.5)
    assert ended == [request]
    np.testing.assert_array_equal(request.outputs["IMPORTANCE"], [[1, 2, 0, 0], [3, 4, 5, 6]])
    np.testing.assert_array_equal(request.engine_ms, [1.5, 2.5])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ('output [ { name: "LOGITS" data_type: TYPE_FP32 dims: [ 3 ] } ]', r"dims: \[ 2 \]"),
        ('output [ { name: "IMPORTANCE" data_type: TYPE_FP32 dims: [ 8 ] } ]', r"dims: \[ -1 \]"),
        ('output [ { name: "OFFSETS" data_type: TYPE_INT32 dims: [ -1, 2 ] } ]', "at least one of"),
        ('output [ { name: "LOGITS" data_type: TYPE_FP64 dims: [ 2 ] } ]', "TYPE_FP32"),
        ('output [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 2 ] } ]', "one of EMBEDDING, LOGITS"),
    ],
)
def test_unavailable_outputs_are_refused(build: Callable[..., Path], outputs: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(outputs=outputs)


def test_a_token_classifier_answers_with_entities(open_front: Callable[..., TextFront]) -> None:
    front = open_front(outputs='output [ { name: "ENTITIES" }, { name: "TOKEN_LOGITS" } ]')
    parameters = {"aggregation_strategy": "simple"}
    grouped = text_request("two é words", "x", outputs=["ENTITIES"], parameters=parameters)
    single = text_request("two é words", outputs=["ENTITIES"])
    wrong = text_request("a", outputs=["ENTITIES"], parameters={"aggregation_strategy": "most"})
    given = ids_request([101, 102], outputs=["ENTITIES"])
    front.execute([grouped, single, wrong, given])
    rows = [json.loads(row) for row in grouped.vectors("ENTITIES")[:, 0]]
    assert len(rows) == 2 and {*rows[0][0]} == {"entity_group", "score", "word", "start", "end"}
    assert (rows[0][0]["start"], rows[0][-1]["end"]) == (0, len("two é words")), "characters, not bytes"
    (tokens,) = single.vectors("ENTITIES")[0]
    assert [(one["index"], one["start"], one["end"]) for one in json.loads(tokens)] == [
        (1, 0, 3),
        (2, 4, 5),
        (3, 6, 11),
    ]
    code, text = wrong.refusal()
    assert code == TritonError.INVALID_ARG
    assert text.startswith("parameter aggregation_strategy: got 'most'; one of none, simple, first, average, max")
    assert "inputs: got 'none'; TEXT" in given.refusal()[1]
    asked = Request(("DESCRIPTION",))
    front.execute([asked])
    assert json.loads(asked.vectors("DESCRIPTION").item())["kind"] == "token_classification"


def test_sparse_vectors_of_a_masked_language_model(
    open_front: Callable[..., TextFront], light_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(light_checkpoint, checkpoint)
    stated = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**stated, "architectures": ["BertForMaskedLM"]}))
    front = open_front(
        outputs='output [ { name: "SPARSE_INDICES" }, { name: "SPARSE_VALUES" } ]', checkpoint=checkpoint
    )
    request = text_request("two words", "x", outputs=["SPARSE_INDICES", "SPARSE_VALUES"])
    asked, wrong = Request(("DESCRIPTION",)), text_request("x", parameters={"aggregation_strategy": "max"})
    front.execute([request, asked, wrong])
    indices, values = request.vectors("SPARSE_INDICES"), request.vectors("SPARSE_VALUES")
    assert indices.shape == values.shape and indices.dtype == np.int32
    assert ((indices >= 0) == (values > 0)).all() and (values > 0).any()
    assert json.loads(asked.vectors("DESCRIPTION").item())["kind"] == "sparse_embedding"
    assert "parameter aggregation_strategy: got 'max'; one of" in wrong.refusal()[1]


def test_texts_are_cut_to_the_tokens_that_a_request_names(open_front: Callable[..., TextFront]) -> None:
    front = open_front()
    cut = [
        text_request("one two three four", outputs=["NUM_TOKENS"], parameters={"truncate_prompt_tokens": most})
        for most in (4, "3", -1, 512)
    ]
    ids = ids_request([101, 7, 8, 102], outputs=["NUM_TOKENS"], parameters={"truncate_prompt_tokens": 2})
    front.execute([*cut, ids])
    assert [one.vectors("NUM_TOKENS").item() for one in (*cut, ids)] == [4, 3, 6, 6, 2]
    for value, allowed in ((0, "1 or more, or -1"), (513, "at most 512, the tokens that"), (2, "at least 3 for TEXT")):
        wrong = text_request("one two", parameters={"truncate_prompt_tokens": value})
        front.execute([wrong])
        code, text = wrong.refusal()
        assert code == TritonError.INVALID_ARG
        assert text.startswith("parameter truncate_prompt_tokens: got ") and allowed in text
