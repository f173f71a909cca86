"""The example that classifies texts: batches, parameters, and when it asks again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from client import classify_text_grpc
from client.classify_text_grpc import Answer


class Reply:
    def __init__(self, rows: int) -> None:
        self._values = {
            "LABEL": np.array([[b"alarm"]] * rows, dtype=object),
            "CONFIDENCE": np.full((rows, 1), 0.5, np.float32),
            "LEVEL": np.full((rows, 1), 2, np.int32),
        }

    def as_numpy(self, name: str) -> Any:
        return self._values[name]


class Client:
    """Records what it is asked; `failures` holds statuses for the next requests."""

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []
        self.parameters: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def infer(
        self, model: str, inputs: list[Any], outputs: list[Any], parameters: dict[str, Any], client_timeout: float
    ) -> Reply:
        assert model == "classify_text" and client_timeout > 0
        assert [one.name() for one in outputs] == ["LABEL", "CONFIDENCE", "LEVEL"]
        self.shapes.append(inputs[0].shape())
        self.parameters.append(parameters)
        if self.failures:
            raise InferenceServerException("told to", status=f"StatusCode.{self.failures.pop(0)}")
        return Reply(inputs[0].shape()[0])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_text_grpc, "BACKOFF_S", 0.001)


def test_texts_go_in_batches_with_their_parameters() -> None:
    client = Client()
    found = classify_text_grpc.classify(client, ["wake me at six"] * 100, {"min_accuracy": 0.9})
    assert found == [Answer("alarm", 0.5, 2)] * 100
    assert client.shapes == [[64, 1], [36, 1]]
    assert client.parameters == [{"min_accuracy": 0.9}] * 2


def test_it_asks_again_when_unavailable_and_only_then() -> None:
    client = Client()
    client.failures = ["UNAVAILABLE"] * 3
    assert len(classify_text_grpc.classify(client, ["x"])) == 1
    assert len(client.shapes) == 4
    client.failures = ["INVALID_ARGUMENT"]
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        classify_text_grpc.classify(client, ["x"])
    assert len(client.shapes) == 5
    client.failures = ["UNAVAILABLE"] * 9
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        classify_text_grpc.classify(client, ["x"])
    assert len(client.shapes) == 5 + classify_text_grpc.ATTEMPTS
