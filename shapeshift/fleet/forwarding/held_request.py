"""A request that outlives the call in which Triton handed it over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.serving.pb_utils import InferenceRequest, PbUtils, ResponseSender, Tensor


class HeldRequest:
    """A copy of a request, which a front serves as it serves Triton's; see `pb_utils.InferenceRequest`.

    arrays  the inputs by name
    given   the parameters
    """

    def __init__(self, pb_utils: PbUtils, request: InferenceRequest, sender: ResponseSender) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._id = request.request_id()
        self._parameters = request.parameters()
        self._outputs = list(request.requested_output_names())
        # Triton frees its buffers when `execute` returns.
        self.arrays: dict[str, NDArray[Any]] = {one.name(): np.array(one.as_numpy()) for one in request.inputs()}
        self.given: dict[str, Any] = json.loads(self._parameters or "{}")

    def request_id(self) -> str:
        return self._id

    def inputs(self) -> Sequence[Tensor]:
        return [self._pb_utils.Tensor(name, values) for name, values in self.arrays.items()]

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> Sequence[str]:
        return self._outputs

    def get_response_sender(self) -> ResponseSender:
        return self._sender
