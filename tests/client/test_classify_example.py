"""The example that classifies images: batches, parameters, retries."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from client import classify_image_grpc
from tests.client.recording import Client

ROW = {"LABEL": np.array([[b"cat"]], dtype=object), "OUTCOME": np.array([[b"in_time"]], dtype=object)}


@pytest.fixture
def client() -> Client:
    return Client("classify_image", ROW)


def test_files_go_in_batches_with_their_parameters(client: Client) -> None:
    assert classify_image_grpc.classify(client, [b"x"] * 100, latency_ms=50.0) == [("cat", "in_time")] * 100
    assert client.shapes == [[64, 1], [36, 1]]
    assert client.parameters == [{"latency_ms": 50.0}] * 2


def test_it_retries_only_when_unavailable(client: Client) -> None:
    client.failures = ["UNAVAILABLE"]
    assert len(classify_image_grpc.classify(client, [b"x"])) == 1
    assert len(client.shapes) == 2
    client.failures = ["INVALID_ARGUMENT"]
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        classify_image_grpc.classify(client, [b"x"])
    assert len(client.shapes) == 3
    client.failures = ["UNAVAILABLE"] * 9
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        classify_image_grpc.classify(client, [b"x"])
    assert len(client.shapes) == 3 + classify_image_grpc.ATTEMPTS
