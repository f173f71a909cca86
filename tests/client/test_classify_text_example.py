"""The example that classifies texts: batches, parameters, retries."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from client import classify_text_grpc
from client.classify_text_grpc import Answer
from tests.client.recording import Client

ROW = {
    "LABEL": np.array([[b"alarm"]], dtype=object),
    "CONFIDENCE": np.full((1, 1), 0.5, np.float32),
    "LEVEL": np.full((1, 1), 2, np.int32),
}


@pytest.fixture
def client() -> Client:
    return Client("classify_text", ROW)


def test_texts_go_in_batches_with_their_parameters(client: Client) -> None:
    found = classify_text_grpc.classify(client, ["wake me at six"] * 100, {"min_accuracy": 0.9})
    assert found == [Answer("alarm", 0.5, 2)] * 100
    assert client.shapes == [[64, 1], [36, 1]]
    assert client.outputs == [["LABEL", "CONFIDENCE", "LEVEL"]] * 2
    assert client.parameters == [{"min_accuracy": 0.9}] * 2


def test_it_retries_only_when_unavailable(client: Client) -> None:
    client.failures = ["UNAVAILABLE"]
    assert len(classify_text_grpc.classify(client, ["x"])) == 1
    assert len(client.shapes) == 2
    client.failures = ["INVALID_ARGUMENT"]
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        classify_text_grpc.classify(client, ["x"])
    assert len(client.shapes) == 3
    client.failures = ["UNAVAILABLE"] * 9
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        classify_text_grpc.classify(client, ["x"])
    assert len(client.shapes) == 3 + classify_text_grpc.ATTEMPTS
