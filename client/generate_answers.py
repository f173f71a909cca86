"""Several answers to a prompt, or one in JSON: python client/generate_answers.py --n 3 "Once upon a time"."""

import argparse
import json
import random
import sys
import time
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = "generate_unary"
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 30.0, 5, 0.1


def generate(client: Any, prompt: str, **sampling: Any) -> Any:
    """The answers to `prompt`; `sampling` are parameters of the model, such as n, logprobs or structured_outputs.

    Retries while the server is unavailable, with growing pauses.
    """
    inputs = [
        _tensor("text_input", "BYTES", np.array([prompt], dtype=object)),
        _tensor("sampling_parameters", "BYTES", np.array([json.dumps(sampling)], dtype=object)),
        _tensor("return_logprobs", "BOOL", np.array(["logprobs" in sampling])),
    ]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return client.infer(MODEL, inputs, client_timeout=TIMEOUT_S)
        except InferenceServerException as error:
            if error.status() != "StatusCode.UNAVAILABLE" or attempt == ATTEMPTS:
                raise
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError("not reached")


def _tensor(name: str, kind: str, values: Any) -> Any:
    tensor = triton.InferInput(name, list(values.shape), kind)
    tensor.set_data_from_numpy(values)
    return tensor


def show(result: Any, has_logprobs: bool) -> None:
    """Print each answer, and how likely each of its tokens was."""
    for row, text in enumerate(result.as_numpy("text_output")):
        print(f"{row}: {text.decode()}")
        if has_logprobs:
            for token in json.loads(result.as_numpy("logprobs")[row]):
                said = (f"{one['decoded_token']!r} {one['logprob']:.2f}" for one in token.values())
                print("   ", ", ".join(said))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--n", type=int, default=1, help="number of answers")
    parser.add_argument("--logprobs", type=int, help="most likely tokens that are listed in each place, 0 to 20")
    parser.add_argument("--json-schema", help="that the answers follow")
    parser.add_argument("prompt")
    arguments = parser.parse_args()
    sampling: dict[str, Any] = {"max_tokens": arguments.max_tokens, "n": arguments.n, "temperature": 0.7}
    if arguments.logprobs is not None:
        sampling["logprobs"] = arguments.logprobs
    if arguments.json_schema is not None:
        sampling["structured_outputs"] = {"json": arguments.json_schema, "disable_any_whitespace": True}
    try:
        with triton.InferenceServerClient(arguments.url) as connection:
            show(generate(connection, arguments.prompt, **sampling), arguments.logprobs is not None)
    except InferenceServerException as error:
        sys.exit(f"{arguments.url}: {error}")
