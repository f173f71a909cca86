"""Labels of texts over gRPC: python client/classify_text_grpc.py --url localhost:8001 "some text" "another"."""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL, MAX_BATCH = "classify_text", 64
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 10.0, 5, 0.1


class Answer(NamedTuple):
    """level: the last level that contributes to the answer, from 1."""

    label: str
    confidence: float
    level: int


def classify(client: Any, texts: Sequence[str], parameters: dict[str, Any] | None = None) -> list[Answer]:
    """One answer a text. `parameters`: for example {"level": 1} or {"min_accuracy": 0.9} (docs/cascade.md)."""
    answers = []
    for start in range(0, len(texts), MAX_BATCH):
        rows = np.array([[text.encode()] for text in texts[start : start + MAX_BATCH]], dtype=np.object_)
        answer = infer(client, rows, parameters or {})
        columns = [answer.as_numpy(name)[:, 0].tolist() for name in ("LABEL", "CONFIDENCE", "LEVEL")]
        answers += [
            Answer(label.decode(), confidence, level) for label, confidence, level in zip(*columns, strict=True)
        ]
    return answers


def infer(client: Any, rows: Any, parameters: dict[str, Any]) -> Any:
    """Send one request; retry while the server is unavailable, with growing pauses."""
    text = triton.InferInput("TEXT", rows.shape, "BYTES")
    text.set_data_from_numpy(rows)
    outputs = [triton.InferRequestedOutput(name) for name in ("LABEL", "CONFIDENCE", "LEVEL")]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = client.infer(MODEL, [text], outputs=outputs, parameters=parameters, client_timeout=TIMEOUT_S)
            break
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE" or attempt == ATTEMPTS:
                raise
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint")
    parser.add_argument("texts", nargs="+")
    arguments = parser.parse_args()
    try:
        with triton.InferenceServerClient(arguments.url) as client:
            for text, answer in zip(arguments.texts, classify(client, arguments.texts), strict=True):
                print(f"{text!r}: {answer.label} ({answer.confidence:.3f}, level {answer.level})")
    except InferenceServerException as error:
        sys.exit(f"{arguments.url}: {error}")
