"""Labels for image files over gRPC: python client/classify_image_grpc.py --latency-ms 500 photo.jpg"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL, MAX_BATCH = "classify_image", 64
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 10.0, 5, 0.1


def classify(client: Any, files: Sequence[bytes], **parameters: Any) -> list[tuple[str, str]]:
    """(label, outcome) of each JPEG or PNG file; the label of an image that was evicted is empty.

    parameters: task, latency_ms, utility; what is left out is the model's or the task's own.
    """
    found = []
    for start in range(0, len(files), MAX_BATCH):
        rows = np.array([[data] for data in files[start : start + MAX_BATCH]], dtype=np.object_)
        image = triton.InferInput("IMAGE", rows.shape, "BYTES")
        image.set_data_from_numpy(rows)
        answer = infer(client, image, parameters)
        labels, outcomes = (answer.as_numpy(name)[:, 0] for name in ("LABEL", "OUTCOME"))
        found += [(label.decode(), outcome.decode()) for label, outcome in zip(labels, outcomes, strict=True)]
    return found


def infer(client: Any, image: Any, parameters: dict[str, Any]) -> Any:
    """Ask once, and again after a growing pause for as long as the server says that it is unavailable."""
    for attempt in range(1, ATTEMPTS):
        try:
            return client.infer(MODEL, [image], parameters=parameters, client_timeout=TIMEOUT_S)
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE":
                raise
        time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
    return client.infer(MODEL, [image], parameters=parameters, client_timeout=TIMEOUT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint")
    parser.add_argument("--task", help="which task; default: the model's")
    parser.add_argument("--latency-ms", type=float, help="by when the answers are wanted; default: the task's")
    parser.add_argument("--utility", type=float, help="what an answer in time is worth; default: the task's")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in ("task", "latency_ms", "utility")}
    stated = {name: value for name, value in given.items() if value is not None}
    with triton.InferenceServerClient(arguments.url) as client:
        data = [file.read_bytes() for file in arguments.files]
        for file, (label, outcome) in zip(arguments.files, classify(client, data, **stated), strict=True):
            print(f"{file}: {label or '-'} ({outcome})")
