"""A fake client that records an example's calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException


class Answer:
    def __init__(self, row: Mapping[str, np.ndarray], rows: int) -> None:
        self._row, self._rows = row, rows

    def as_numpy(self, name: str) -> np.ndarray:
        return np.repeat(self._row[name], self._rows, axis=0)


class Client:
    """Answers every row of a request for `model` with `row`; `failures` holds statuses for the next requests."""

    def __init__(self, model: str, row: Mapping[str, np.ndarray]) -> None:
        self._model, self._row = model, row
        self.shapes: list[list[int]] = []
        self.parameters: list[dict[str, Any]] = []
        self.outputs: list[list[str]] = []
        self.failures: list[str] = []

    def infer(
        self,
        model: str,
        inputs: list[Any],
        outputs: list[Any] | None = None,
        *,
        parameters: dict[str, Any],
        client_timeout: float,
    ) -> Answer:
        assert model == self._model and client_timeout > 0
        self.shapes.append(inputs[0].shape())
        self.parameters.append(parameters)
        self.outputs.append([one.name() for one in outputs or ()])
        if self.failures:
            raise InferenceServerException("fake failure", status=f"StatusCode.{self.failures.pop(0)}")
        return Answer(self._row, inputs[0].shape()[0])
