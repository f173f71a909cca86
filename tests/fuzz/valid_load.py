"""Valid requests beside malformed ones: each answer is held against the one that was known before."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from tests.fuzz.declarations import Declaration
from tests.fuzz.wire import message

_UNARY = "/inference.GRPCInferenceService/ModelInfer"
_PAUSE_S = 0.02
_TIMEOUT_S = 60.0
# Of two vectors of one text in bf16, whose other rows differ.
_LEAST_COSINE = 0.99


class ValidLoad:
    """A context manager. Within the block a thread asks each front in turn, again and again.

    right: answers as before, by front; wrong: the others, and errors, in words.
    """

    def __init__(self, grpc_url: str, fronts: Sequence[Declaration]) -> None:
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._fronts = [front for front in fronts if not front.streams]
        self._channel = grpc.insecure_channel(grpc_url)
        infer = self._channel.unary_unary(_UNARY, response_deserializer=service_pb2.ModelInferResponse.FromString)
        self._infer = lambda front: _first_output(infer(message(front.valid), timeout=_TIMEOUT_S))
        self._known = {front.name: self._infer(front) for front in self._fronts}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="valid load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._channel.close()

    def _ask(self) -> None:
        turn = 0
        while not self._closing.wait(_PAUSE_S):
            front = self._fronts[turn % len(self._fronts)]
            turn += 1
            try:
                answer = self._infer(front)
            except grpc.RpcError as error:
                self.wrong.append(f"{front.name}: {error.code().name}: {error.details()}")
                continue
            if _agree(self._known[front.name], answer):
                self.right[front.name] += 1
            else:
                self.wrong.append(f"{front.name}: {answer}")


def _first_output(response: Any) -> np.ndarray:
    content = response.raw_output_contents[0]
    if response.outputs[0].datatype == "BYTES":
        return np.asarray(deserialize_bytes_tensor(content))
    return np.frombuffer(content, np.float32)


def _agree(known: np.ndarray, answer: np.ndarray) -> bool:
    if known.dtype == np.float32:
        product = float(known @ answer) / float(np.linalg.norm(known) * np.linalg.norm(answer))
        return known.shape == answer.shape and product >= _LEAST_COSINE
    return np.array_equal(known, answer)
