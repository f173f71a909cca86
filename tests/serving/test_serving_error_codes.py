"""Codes of errors, within one model and between two."""

from __future__ import annotations

import pytest

from shapeshift.errors import (
    CancelledRequestError,
    EngineError,
    InvalidInputError,
    ModelDiedError,
    ModelError,
    ModelGoneError,
    NotFoundError,
    OverloadedError,
    UnsupportedError,
)
from shapeshift.serving import error_codes
from tests.fakes import PbUtils, TritonError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("f", 1, "2"), TritonError.INVALID_ARG),
        (NotFoundError("x"), TritonError.NOT_FOUND),
        (OverloadedError("x"), TritonError.UNAVAILABLE),
        (UnsupportedError("x"), TritonError.UNSUPPORTED),
        (CancelledRequestError("x"), TritonError.CANCELLED),
        (EngineError("x"), TritonError.INTERNAL),
        (ModelGoneError("x"), TritonError.UNAVAILABLE),
        (ModelDiedError("x"), TritonError.INTERNAL),
        (ModelError("x", "NOT_FOUND"), TritonError.NOT_FOUND),
        (ValueError("x"), TritonError.INTERNAL),
    ],
)
def test_codes(error: Exception, code: int) -> None:
    made = error_codes.triton_error(PbUtils(), error)
    assert made.code() == code
    assert getattr(TritonError, error_codes.code_name(error)) == code
    own = not isinstance(error, ValueError)
    assert made.message() == (str(error) if own else "ValueError: x")
    assert error_codes.error_response(PbUtils(), error).has_error()


class OldError:
    """The error type of a server from before most codes."""

    INTERNAL = 1

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


def test_a_code_that_the_server_lacks_becomes_internal() -> None:
    pb_utils = PbUtils()
    pb_utils.TritonError = OldError
    assert error_codes.triton_error(pb_utils, CancelledRequestError("x")).code() == OldError.INTERNAL


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("Request for unknown model: 'encode_w00' is not found", None, ModelGoneError),
        ("Request for unknown model: 'encode' has no available versions", None, ModelGoneError),
        ("Model 'encode' is not ready", TritonError.UNAVAILABLE, ModelGoneError),
        ("BLS is only supported during the 'execute' function.", None, ModelGoneError),
        ("the model is being unloaded; retry elsewhere", TritonError.UNAVAILABLE, ModelGoneError),
        ("Stub process 'w_0' is not healthy.", TritonError.INTERNAL, ModelDiedError),
        ("no task 'x' is not found", TritonError.INVALID_ARG, ModelError),
        ("the bin is shorter", TritonError.UNSUPPORTED, ModelError),
        ("queue_rows: 3 rows wait", TritonError.UNAVAILABLE, ModelGoneError),
        (
            "Model w - Error when running inference: Failed for execute the inference request. Model 'w' is not ready.",
            TritonError.INTERNAL,
            ModelGoneError,
        ),
        # Of gRPC, when a server cannot be reached or does not answer.
        ("Stream removed (ping timeout)", TritonError.UNAVAILABLE, ModelGoneError),
        ("Broken pipe", TritonError.UNAVAILABLE, ModelGoneError),
        ("GOAWAY received; Error code: 2; Debug Text: max_age", TritonError.UNAVAILABLE, ModelGoneError),
        ("[UNAVAILABLE] queue_rows: 3 rows wait", TritonError.INTERNAL, ModelError),
        # What a client's own words are in.
        ("[NOT_FOUND] parameter task: no task 'Stub process x is not healthy'", None, ModelError),
        ("a task 'not healthy' failed", None, EngineError),
        ("task: got 'Stub process x is not healthy'; one of a, b", None, EngineError),
        (
            "Failed to process the request(s) for model 'w', message: ValueError: Stub process 'x' is not healthy",
            None,
            EngineError,
        ),
        (
            "Failed to process the request(s) for model 'w', message: KeyError: \"model 'x' is not ready\"",
            None,
            EngineError,
        ),
        ("Model 'w' refused the text 'x is not ready'", None, EngineError),
        ("unknown text: Request for unknown model: 'x'", None, EngineError),
        (
            "Failed to process the request(s) for model instance 'w_0', message: Stub process 'w_0' is not healthy.",
            None,
            ModelDiedError,
        ),
        ("ValueError: x", TritonError.INTERNAL, EngineError),
        ("something else", None, EngineError),
    ],
)
def test_what_another_models_error_means(text: str, code: int | None, kind: type[Exception]) -> None:
    found = error_codes.error_of(text, error_codes.code_of(PbUtils(), code))
    assert type(found) is kind and text.endswith(str(found))
    if isinstance(found, ModelError) and not text.startswith("["):
        assert getattr(TritonError, found.code) == code


@pytest.mark.parametrize("error", [InvalidInputError("f", 1, "2"), OverloadedError("x"), EngineError("y")])
def test_a_code_in_the_text_survives_the_way_between_models(error: Exception) -> None:
    sent = error_codes.with_code(PbUtils(), error).error()
    assert sent is not None and sent.code() == getattr(TritonError, error_codes.code_name(error))
    found = error_codes.error_of(sent.message(), error_codes.code_of(PbUtils(), sent.code()))
    assert isinstance(found, ModelError)
    assert (found.code, str(found)) == (error_codes.code_name(error), str(error))


def test_brackets_that_hold_no_code_are_text() -> None:
    assert type(error_codes.error_of("[SOMETHING] x")) is EngineError
