"""The mean of two tensors: a step of the ensemble beside it."""

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """MEAN = (FIRST + SECOND) / 2."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        first, second = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("FIRST", "SECOND"))
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("MEAN", (first + second) / 2)])
