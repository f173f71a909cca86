"""The example that classifies images: batches, parameters, and when it asks again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from client import classify_image_grpc


class Answer:
    def __init__(self, rows: int) -> None:
        self._values = {
            "LABEL": np.array([[b"cat"]] * rows, dtype=object),
            "OUTCOME": np.array([[b"in_time"]] * rows, dtype=object),
        }

    def as_numpy(self, name: str) -> Any:
        return self._values[name]


class Client:
    """Records what it is asked; `failures` holds statuses for the next requests."""

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []
        self.parameters: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def infer(self, model: str, inputs: list[Any], parameters: dict[str, Any], client_timeout: float) -> Answer:
        assert model == "classify_image" and client_timeout > 0
        self.shapes.append(inputs[0].shape())
        self.parameters.append(parameters)
        if self.failures:
            raise InferenceServerException("told to", status=f"StatusCode.{self.failures.pop(0)}")
        return Answer(inputs[0].shape()[0])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_image_grpc, "BACKOFF_S", 0.001)


def test_files_go_in_batches_with_their_parameters() -> None:
    client = Client()
    assert classify_image_grpc.classify(client, [b"x"] * 100, latency_ms=50.0) == [("cat", "in_time")] * 100
    assert client.shapes == [[64, 1], [36, 1]]
    assert client.parameters == [{"latency_ms": 50.0}] * 2


def test_it_asks_again_when_unavailable_and_only_then() -> None:
    client = Client()
    client.failures = ["UNAVAILABLE"] * 3
    assert len(classify_image_grpc.classify(client, [b"x"])) == 1
    assert len(client.shapes) == 4
    client.failures = ["INVALID_ARGUMENT"]
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        classify_image_grpc.classify(client, [b"x"])
    assert len(client.shapes) == 5
    client.failures = ["UNAVAILABLE"] * 9
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        classify_image_grpc.classify(client, [b"x"])
    assert len(client.shapes) == 5 + classify_image_grpc.ATTEMPTS
