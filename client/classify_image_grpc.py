"""Labels for image files over gRPC: python client/classify_image_grpc.py --latency-ms 500 photo.jpg"""

import argparse
import random
import sys
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
    """(label, outcome) of each JPEG or PNG file; an evicted image has an empty label.

    parameters: task, latency_ms, utility; the model and the task have defaults for each.
    """
    results = []
    for start in range(0, len(files), MAX_BATCH):
        rows = np.array([[data] for data in files[start : start + MAX_BATCH]], dtype=np.object_)
        image = triton.InferInput("IMAGE", rows.shape, "BYTES")
        image.set_data_from_numpy(rows)
        answer = infer(client, image, parameters)
        labels, outcomes = (answer.as_numpy(name)[:, 0] for name in ("LABEL", "OUTCOME"))
        results += [(label.decode(), outcome.decode()) for label, outcome in zip(labels, outcomes, strict=True)]
    return results


def infer(client: Any, image: Any, parameters: dict[str, Any]) -> Any:
    """Send one request; retry while the server is unavailable, with growing pauses."""
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
    parser.add_argument("--task", help="default: the model's task")
    parser.add_argument("--latency-ms", type=float, help="time in which the answers are needed; default: the task's")
    parser.add_argument("--utility", type=float, help="value of an answer in time; default: the task's")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("task", "latency_ms", "utility")}
    parameters = {name: value for name, value in options.items() if value is not None}
    try:
        with triton.InferenceServerClient(arguments.url) as client:
            data = [file.read_bytes() for file in arguments.files]
            for file, (label, outcome) in zip(arguments.files, classify(client, data, **parameters), strict=True):
                print(f"{file}: {label or '-'} ({outcome})")
    except InferenceServerException as error:
        sys.exit(f"{arguments.url}: {error}")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
