"""Answer lengths predicted from the embeddings of prompts, which another model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.adapter_cache.interfaces import Floats, PredictionInput
from shapeshift.adapter_cache.policy.length_prediction import Regressor

_TEXT, _EMBEDDING = "TEXT", "EMBEDDING"


class EmbeddingPredictor:
    """See `interfaces.LengthPredictor`. Each prediction calls the embedding model and waits for its response.

    If the call fails, the regressor predicts without an embedding. The first failure is logged.
    """

    def __init__(self, pb_utils: Any, model: str, weights: Path, log: Callable[[str], None]) -> None:
        """model: the embedding model, such as `encode`; weights: see `Regressor.load`."""
        self._pb_utils = pb_utils
        self._model = model
        self._regressor = Regressor.load(weights)
        self._log: Callable[[str], None] | None = log

    def predict(self, request: PredictionInput) -> int:
        return self._regressor.predict(replace(request, embedding=self._embed(request.text)))

    def learn(self, request: PredictionInput, generated: int) -> None:
        self._regressor.learn(request, generated)

    def _embed(self, text: bytes) -> Floats | None:
        """The embedding of `text`, [n]; None if the call fails."""
        try:
            call = self._pb_utils.InferenceRequest(
                model_name=self._model,
                requested_output_names=[_EMBEDDING],
                inputs=[self._pb_utils.Tensor(_TEXT, np.array([[text]], dtype=object))],
                parameters={"truncate": True},
            )
            response = call.exec()
            if not response.has_error():
                return np.array(response.output_tensors()[0].as_numpy()[0], np.float64)
            reason = str(response.error().message())
        except Exception as error:  # noqa: BLE001  whatever Triton raises, the request is served without an embedding
            reason = str(error)
        if self._log is not None:
            self._log(f"answer lengths are predicted without embeddings of model {self._model}: {reason}")
            self._log = None
        return None
