"""Generated text over a gRPC stream: python client/generate_grpc.py --url localhost:8001 "Once upon a time"."""

import argparse
import queue
import random
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = "generate"
# Between two responses. The first one may wait for a slot.
TIMEOUT_S, ATTEMPTS, BACKOFF_S = 30.0, 5, 0.1
TYPES = {int: ("INT32", np.int32), float: ("FP32", np.float32), bool: ("BOOL", np.bool_), str: ("BYTES", np.object_)}


def generate(client: Any, prompt: str, **fields: int | float | bool | str) -> Generator[str, None, None]:
    """Pieces of the answer to `prompt`; `fields` are further inputs of the model, such as max_tokens.

    Retries while the server is unavailable, with growing pauses. Leaving the loop over the pieces cancels the request.
    """
    inputs = [_tensor(name, value) for name, value in {"text_input": prompt, "stream": True, **fields}.items()]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            yield from _stream(client, inputs)
            return
        except InferenceServerException as error:
            # A refused request has returned no text yet.
            if not _is_unavailable(error) or attempt == ATTEMPTS:
                raise
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))


def _stream(client: Any, inputs: list[Any]) -> Iterator[str]:
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: responses.put(error or result))
    try:
        try:
            client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True, parameters={"forwarded": True})
        except InferenceServerException:
            # The stream has ended before the request: its own error says why.
            raise responses.get(timeout=TIMEOUT_S) from None
        last = False
        while not last:
            response = responses.get(timeout=TIMEOUT_S)
            if isinstance(response, Exception):
                raise response
            yield response.as_numpy("text_output")[0].decode()
            last = response.get_response().parameters["triton_final_response"].bool_param
    finally:
        client.stop_stream(cancel_requests=True)


def _is_unavailable(error: InferenceServerException) -> bool:
    """An error on a stream has no status. With the parameter `forwarded` its text begins with the code."""
    return error.status() == "StatusCode.UNAVAILABLE" or str(error.message()).startswith("[UNAVAILABLE] ")


def _tensor(name: str, value: int | float | bool | str) -> Any:
    kind, dtype = TYPES[type(value)]
    tensor = triton.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("prompt")
    arguments = parser.parse_args()
    try:
        with triton.InferenceServerClient(arguments.url) as connection:
            fields = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
            before = arguments.prompt
            for piece in generate(connection, arguments.prompt, **fields):
                print(before + piece, end="", flush=True)
                before = ""
            print()
    except InferenceServerException as error:
        sys.exit(f"{arguments.url}: {error}")
    except queue.Empty:
        sys.exit(f"{arguments.url}: no answer for {TIMEOUT_S:g} s")
