"""Sentence embeddings over gRPC: python client/encode_grpc.py --url localhost:8001 "some text" "another"."""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

MODEL, MAX_BATCH = "encode", 64
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 10.0, 5, 0.1


def encode(client: Any, texts: Sequence[str]) -> NDArray[np.float32]:
    """One vector a text, float32 [len(texts), 384]; longer texts than the model takes are truncated."""
    rows = np.array([[text.encode()] for text in texts], dtype=np.object_)
    batches = [rows[start : start + MAX_BATCH] for start in range(0, len(rows), MAX_BATCH)]
    return np.concatenate([infer(client, {"TEXT": batch}, {"truncate": True}) for batch in batches])


def encode_ids(client: Any, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The same for at most 64 texts given as token ids, special tokens included."""
    length = max(len(row) for row in ids)
    padded = np.array([[*row, *[0] * (length - len(row))] for row in ids], dtype=np.int64)
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in ids], dtype=np.int64)
    return infer(client, {"INPUT_IDS": padded, "ATTENTION_MASK": mask}, {})


def infer(client: Any, arrays: dict[str, NDArray[Any]], parameters: dict[str, Any]) -> NDArray[np.float32]:
    """Send one request; retry while the server is unavailable, with growing pauses."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "BYTES" if name == "TEXT" else "INT64"))
        inputs[-1].set_data_from_numpy(array)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = client.infer(MODEL, inputs, parameters=parameters, client_timeout=TIMEOUT_S)
            break
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE" or attempt == ATTEMPTS:
                raise
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
    embedding: NDArray[np.float32] = answer.as_numpy("EMBEDDING")
    return embedding


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint")
    parser.add_argument("texts", nargs="+")
    arguments = parser.parse_args()
    try:
        with triton.InferenceServerClient(arguments.url) as client:
            for text, vector in zip(arguments.texts, encode(client, arguments.texts), strict=True):
                print(f"{text!r}: {len(vector)} numbers, {vector[:4]} ...")
    except InferenceServerException as error:
        sys.exit(f"{arguments.url}: {error}")
