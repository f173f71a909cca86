"""One table from error types to Triton's codes, and one for the errors of other models."""

from __future__ import annotations

import json
import re

from shapeshift.errors import (
    CancelledRequestError,
    EngineError,
    InvalidInputError,
    ModelDiedError,
    ModelError,
    ModelGoneError,
    NotFoundError,
    OverloadedError,
    ShapeshiftError,
    UnsupportedError,
)
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, TritonError

# Over HTTP these become 400, 404, 503, 501 and 400; everything else is INTERNAL, 500.
_CODES: tuple[tuple[type[ShapeshiftError], str], ...] = (
    (InvalidInputError, "INVALID_ARG"),
    (NotFoundError, "NOT_FOUND"),
    (OverloadedError, "UNAVAILABLE"),
    (ModelGoneError, "UNAVAILABLE"),
    (UnsupportedError, "UNSUPPORTED"),
    (CancelledRequestError, "CANCELLED"),
)
CODES = ("OK", *dict.fromkeys(code for _, code in _CODES), "INTERNAL")
"""Every way in which a request can end."""

# Triton's own sentences, where nothing but their text says what has happened: it gives no code with an error of a
# stream or of a call between its models (24.10). They count at the beginning of a text only, word by word but for the
# names of models: what a client or an exception says comes later. Fronts of ours put their code before the text, see
# `with_code`.
_WRAPPED = (
    r"(Model \S+ - Error when running inference: )?(Failed for execute the inference request\. )?"
    r"(Failed to process the request\(s\)( for model (instance )?'[^']*')?, (message: )?)?"
)
_DIED = re.compile(rf"{_WRAPPED}(Stub process ('[^']*' )?is not healthy|unexpected termination)")
_GONE = re.compile(
    rf"{_WRAPPED}(Request for unknown model: |[Mm]odel '[^']*'( version \S+)? is (not ready|unavailable)"
    r"|BLS is only supported|the model is being unloaded)"
)
_CODED = re.compile(r"\[([A-Z_]+)\] ")
FORWARDED = "forwarded"
"""The request parameter with which a caller asks a front of ours to put the code into an error's text."""


def code_name(error: BaseException) -> str:
    """The name of Triton's code for `error`."""
    if isinstance(error, ModelError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")


def text_of(error: BaseException) -> str:
    """The text that a client gets; an error that is not ours is named by its type."""
    return str(error) if isinstance(error, ShapeshiftError) else f"{type(error).__name__}: {error}"


def triton_error(pb_utils: PbUtils, error: BaseException, prefix: str = "") -> TritonError:
    """`error` as a `pb_utils.TritonError`."""
    # A server that lacks a code (they came over time) gets INTERNAL, its own default.
    code = getattr(pb_utils.TritonError, code_name(error), pb_utils.TritonError.INTERNAL)
    return pb_utils.TritonError(f"{prefix}{text_of(error)}", code)


def error_response(pb_utils: PbUtils, error: BaseException) -> InferenceResponse:
    """A response that carries nothing but `error`."""
    return pb_utils.InferenceResponse(error=triton_error(pb_utils, error))


def with_code(pb_utils: PbUtils, error: BaseException) -> InferenceResponse:
    """As `error_response`, with the code in the text, for a request that another model has forwarded.

    Between models an error may lose its code (24.10); `error_of` reads it from the text.
    """
    return pb_utils.InferenceResponse(error=triton_error(pb_utils, error, f"[{code_name(error)}] "))


def is_forwarded(request: InferenceRequest) -> bool:
    """Whether another front of ours has forwarded `request`, and reads codes from texts."""
    try:
        return json.loads(request.parameters() or "{}").get(FORWARDED) is True
    except (ValueError, AttributeError):
        return False


def code_of(pb_utils: PbUtils, code: object) -> str:
    """The name of a code of `pb_utils.TritonError`; empty where there is none."""
    return next((name for name in CODES if code is not None and code == getattr(pb_utils.TritonError, name, None)), "")


def error_of(text: str, code: str = "") -> ShapeshiftError:
    """What another model's error means. code: the name of its code, empty where that is unknown.

    ModelError with the code that a front of ours gave, in its text (see `with_code`) or as `code`; ModelGoneError where
    the model is not loaded or its server not reached, ModelDiedError where the model's process has died, EngineError
    for any other failure. Without any code the sentence with which Triton begins decides, never a word of a client.
    """
    coded = _CODED.match(text)
    if coded and coded[1] in CODES:
        return ModelError(text[coded.end() :], coded[1])
    # A model that refuses a request is loaded.
    if code in ("INVALID_ARG", "UNSUPPORTED", "CANCELLED"):
        return ModelError(text, code)
    # A front of ours would have put its code before the text: it is Triton that says so, or gRPC.
    if code in ("UNAVAILABLE", "NOT_FOUND") or _GONE.match(text):
        return ModelGoneError(text)
    return ModelDiedError(text) if _DIED.match(text) else EngineError(text)
