"""Answers OUT = IN. Model parameters: `fail` makes the load fail with that text, `delay_s` delays requests."""

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils

# Proves that a backend finds the package that started the server.
import shapeshift.settings  # noqa: F401


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        declared = json.loads(args["model_config"])["parameters"]
        values = {name: value["string_value"] for name, value in declared.items()}
        if "fail" in values:
            raise RuntimeError(values["fail"])
        self.delay_s = float(values.get("delay_s", "0"))

    def execute(self, requests: list[Any]) -> list[Any]:
        time.sleep(self.delay_s)
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]) for values in inputs]
