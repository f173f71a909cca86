"""The embedding of a prompt, from a model that stands beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shapeshift.adapter_cache.predict import Floats

_TEXT, _EMBEDDING = "TEXT", "EMBEDDING"


class Embedder:
    """Asks `model`, such as `encode`, and waits for its answer; what goes wrong is said once through `log`."""

    def __init__(self, pb_utils: Any, model: str, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        self._model = model
        self._log: Callable[[str], None] | None = log

    def __call__(self, text: bytes) -> Floats | None:
        """The embedding of `text`, [n]; None where there is none to be had."""
        try:
            asked = self._pb_utils.InferenceRequest(
                model_name=self._model,
                requested_output_names=[_EMBEDDING],
                inputs=[self._pb_utils.Tensor(_TEXT, np.array([[text]], dtype=object))],
                parameters={"truncate": True},
            )
            response = asked.exec()
            if not response.has_error():
                return np.array(response.output_tensors()[0].as_numpy()[0], np.float64)
            why = str(response.error().message())
        except Exception as error:  # noqa: BLE001  whatever Triton raises, the request is served without it
            why = str(error)
        if self._log is not None:
            self._log(f"answers are foretold without embeddings of {self._model}: {why}")
            self._log = None
        return None
