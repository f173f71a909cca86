"""A call from one model to another: what is sent, what comes back, and what an error of the other model means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapeshift.errors import ModelError, ModelGoneError
from shapeshift.serving import bls
from tests.fakes import InferenceResponse, PbUtils, Tensor, TritonError

IN = {"IN": np.array([1.0, 2.0], np.float32)}


class Other:
    """A model that doubles IN, or answers `error`. asked: the requests that it got."""

    decoupled = False

    def __init__(self, error: TritonError | None = None) -> None:
        self.asked: list[Any] = []
        self.memory = np.zeros(2, np.float32)
        self._error = error

    def execute(self, requests: list[Any]) -> list[InferenceResponse]:
        self.asked += requests
        if self._error is not None:
            return [InferenceResponse(error=self._error)]
        self.memory[:] = 2 * requests[0].tensors["IN"].as_numpy()
        return [InferenceResponse([Tensor("OUT", self.memory)])]


def serving(**models: Any) -> PbUtils:
    pb_utils = PbUtils()
    pb_utils.models.update(models)
    return pb_utils


def test_the_outputs_are_copies_of_what_the_model_answered() -> None:
    other = Other()
    found = bls.call(serving(other=other), "other", IN, ["OUT"])
    # Triton's memory is written to by the next call.
    other.memory[:] = -1
    assert {name: values.tolist() for name, values in found.items()} == {"OUT": [2.0, 4.0]}
    (request,) = other.asked
    assert (request.requested_output_names(), request.parameters()) == (["OUT"], "")


def test_a_request_states_only_what_the_call_states() -> None:
    given: list[dict[str, Any]] = []
    pb_utils = serving(other=Other())
    make = pb_utils.InferenceRequest

    def note(**options: Any) -> Any:
        given.append(options)
        return make(**options)

    pb_utils.InferenceRequest = note
    bls.call(pb_utils, "other", IN, ["OUT"])
    assert given[0].keys() == {"model_name", "requested_output_names", "inputs"}


@pytest.mark.parametrize("code", ["INVALID_ARG", "UNSUPPORTED"])
def test_a_refusal_keeps_its_code_and_its_text(code: str) -> None:
    other = Other(TritonError("IN: too long", getattr(TritonError, code)))
    with pytest.raises(ModelError, match="^IN: too long$") as caught:
        bls.call(serving(other=other), "other", IN, ["OUT"])
    assert caught.value.code == code


def test_a_model_that_is_not_there_is_gone() -> None:
    with pytest.raises(ModelGoneError, match="'other' is not ready") as caught:
        bls.call(serving(), "other", IN, ["OUT"])
    assert caught.value.__cause__ is None
