"""Answer lengths predicted from the embeddings of prompts, which another model computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from shapeshift.adapter_cache.policy.length_prediction import LengthPredictor, PredictionInput, Regressor
from shapeshift.errors import OverloadedError
from shapeshift.serving import bls
from shapeshift.serving.call_pool import CallPool
from shapeshift.serving.error_codes import text_of
from shapeshift.serving.pb_utils import PbUtils

_TEXT, _EMBEDDING = "TEXT", "EMBEDDING"
_THREADS, _MOST_WAITING = 4, 256


class EmbeddingPredictor(LengthPredictor):
    """See `length_prediction.LengthPredictor`. `predict_later` calls the embedding model on a thread of its own.

    If the call fails or takes too long, the regressor predicts without an embedding. The first failure is logged.

    limit_s: of a call; a prediction is not worth a longer wait of the request.
    """

    limit_s = 1.0

    def __init__(self, pb_utils: PbUtils, model: str, weights: Path, log: Callable[[str], None]) -> None:
        """model: the embedding model, such as `encode`; weights: see `Regressor.load`."""
        self._pb_utils = pb_utils
        self._model = model
        self._regressor = Regressor.load(weights)
        self._log: Callable[[str], None] | None = log
        # A model that does not answer keeps as many threads as the pool has; from then on nothing waits for it.
        self._calls = CallPool("predictor_model", _THREADS, _MOST_WAITING, max_abandoned=_THREADS)

    def predict(self, request: PredictionInput) -> int:
        return self._regressor.predict(request)

    def predict_later(self, request: PredictionInput, then: Callable[[int], None]) -> None:
        call = partial(self._predict_with_embedding, request)
        done = partial(self._predicted, request, then)
        try:
            self._calls.submit(self._model, call, done, time.monotonic() + self.limit_s)
        except OverloadedError as error:
            self._predicted(request, then, error)

    def learn(self, request: PredictionInput, generated: int) -> None:
        self._regressor.learn(request, generated)

    def close(self) -> None:
        self._calls.close()

    def _predict_with_embedding(self, request: PredictionInput) -> int:
        text = np.array([[request.text]], dtype=object)
        outputs = bls.call(self._pb_utils, self._model, {_TEXT: text}, [_EMBEDDING], {"truncate": True})
        return self._regressor.predict(replace(request, embedding=outputs[_EMBEDDING][0].astype(np.float64)))

    def _predicted(self, request: PredictionInput, then: Callable[[int], None], outcome: int | Exception) -> None:
        if isinstance(outcome, Exception):
            self._log_once(outcome)
            outcome = self._regressor.predict(request)
        then(outcome)

    def _log_once(self, error: Exception) -> None:
        log, self._log = self._log, None
        if log is not None:
            log(f"answer lengths are predicted without embeddings of model {self._model}: {text_of(error)}")
