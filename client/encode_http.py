"""Sentence embeddings over HTTP: python client/encode_http.py --url localhost:8000 "some text" "another"."""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

MODEL, MAX_BATCH = "encode", 64
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 10.0, 5, 0.1


def connect(url: str) -> Any:
    """A client whose calls fail when the server is silent for TIMEOUT_S."""
    return triton.InferenceServerClient(url, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S)


def encode(client: Any, texts: Sequence[str]) -> NDArray[np.float32]:
    """One vector a text, float32 [len(texts), 384]; longer texts than the model takes are truncated."""
    rows = np.array([[text.encode()] for text in texts], dtype=np.object_)
    batches = [rows[start : start + MAX_BATCH] for start in range(0, len(rows), MAX_BATCH)]
    return np.concatenate([encode_batch(client, batch) for batch in batches])


def encode_batch(client: Any, rows: NDArray[np.object_]) -> NDArray[np.float32]:
    """Send one request; retry while the server is unavailable, with growing pauses."""
    text = triton.InferInput("TEXT", list(rows.shape), "BYTES")
    text.set_data_from_numpy(rows)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = client.infer(MODEL, [text], parameters={"truncate": True})
            break
        except InferenceServerException as error:
            if error.status() != "503" or attempt == ATTEMPTS:
                raise
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
    embedding: NDArray[np.float32] = answer.as_numpy("EMBEDDING")
    return embedding


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000", help="host:port of Triton's HTTP endpoint")
    parser.add_argument("texts", nargs="+")
    arguments = parser.parse_args()
    try:
        with connect(arguments.url) as client:
            for text, vector in zip(arguments.texts, encode(client, arguments.texts), strict=True):
                print(f"{text!r}: {len(vector)} numbers, {vector[:4]} ...")
    except (InferenceServerException, OSError) as error:
        sys.exit(f"{arguments.url}: {error}")
