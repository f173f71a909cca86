"""What a call to a worker holds, and how its answer and its refusal are read."""

from __future__ import annotations

import numpy as np
import pytest

from shapeshift.errors import EngineError, ModelError, ModelGoneError, ShapeshiftError
from shapeshift.polymorph.router.transport import (
    OtherVersionError,
    WorkerInfo,
    WrongBinError,
    meaning,
    read_answer,
    request_of,
)
from shapeshift.polymorph.worker import INPUTS, STATE

KNOWN = (64, 3, 4711, 250, 9000, 5)


def test_a_request_holds_the_ids_of_all_texts_and_their_lengths() -> None:
    ids, lengths = request_of([np.array([5, 6]), np.array([7])]).values()
    assert (ids.tolist(), lengths.tolist(), lengths.dtype) == ([5, 6, 7], [2, 1], np.int32)


def test_a_probe_holds_no_text() -> None:
    sent = request_of([])
    assert tuple(sent) == INPUTS
    assert [(values.shape, values.dtype) for values in sent.values()] == [((0,), np.int64), ((0,), np.int32)]


@pytest.mark.parametrize("appended", [(), (1,), (1, 2)])
def test_an_answer_is_outputs_and_a_report_to_which_newer_workers_append(appended: tuple[int, ...]) -> None:
    vectors = np.ones((2, 4), np.float32)
    answer = {STATE: np.array([*KNOWN, *appended]), "EMBEDDING": vectors}
    outputs, info = read_answer("w", answer, 2)
    assert outputs == {"EMBEDDING": vectors} and info == WorkerInfo(*KNOWN)
    assert STATE in answer, "the answer is the caller's"


def test_a_report_with_a_number_too_few_is_of_an_older_version() -> None:
    with pytest.raises(OtherVersionError, match="STATE has 5 numbers, not 6: it is of an older Shapeshift"):
        read_answer("w", {STATE: np.array(KNOWN[:-1])}, 0)


@pytest.mark.parametrize("texts", [1, 3])
def test_an_answer_for_another_number_of_texts_is_an_error(texts: int) -> None:
    given = {STATE: np.array(KNOWN), "A": np.ones((texts, 4)), "B": np.ones((2, 4))}
    with pytest.raises(EngineError, match=f"^w: answered for a number of texts that is not {texts}$"):
        read_answer("w", given, texts)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("UNSUPPORTED", WrongBinError), ("UNAVAILABLE", ModelGoneError), ("INVALID_ARG", EngineError), ("", EngineError)],
)
def test_a_refusal_has_a_meaning_and_keeps_its_text(code: str, kind: type[ShapeshiftError]) -> None:
    found = meaning(ModelError("its words", code))
    assert type(found) is kind and str(found) == "its words"
