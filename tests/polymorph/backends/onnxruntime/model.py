"""Stands for Triton's own backend `onnxruntime`, which the wheel lacks: it takes the same configuration and files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Computes what the engine of its version computes, for requests of the stated shape."""

    def initialize(self, args: dict[str, str]) -> None:
        import onnxruntime

        config = json.loads(args["model_config"])
        self._outputs = [output["name"] for output in config["output"]]
        self._inputs = [tensor["name"] for tensor in config["input"]]
        file = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(config["parameters"]["intra_op_thread_count"]["string_value"])
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        values = self._session.run(self._outputs, inputs)
        tensors = [
            pb_utils.Tensor(name, np.ascontiguousarray(value))
            for name, value in zip(self._outputs, values, strict=True)
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)
