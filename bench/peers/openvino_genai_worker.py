"""OpenVINO GenAI's batching: `python -m bench.peers.openvino_genai_worker FOLDER PRECISION THREADS CACHE SHARES`.

Runs in its own environment, on a folder made by openvino_genai_export.py. CACHE: the precision of keys and values.
SHARES: 1 for its prefix cache; else 0, where no two prompts are alike. Else the scheduler keeps its defaults.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.protocol import MOST_TOKENS, SEQUENCES, DecodeRequest, replay_in_steps, serve_decoding

CACHE_GB = 2
BLOCK_TOKENS = 32


class Pipeline:
    """Requests join between two steps."""

    most = SEQUENCES

    def __init__(self, folder: str, precision: str, threads: int, cache: str, shares: bool) -> None:
        scheduler = genai.SchedulerConfig()
        if shares:
            scheduler.num_kv_blocks = MOST_TOKENS // BLOCK_TOKENS
        else:
            scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = SEQUENCES
        scheduler.enable_prefix_caching = shares
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": cache,
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._running: dict[int, Any] = {}
        self._request = 0

    def add(self, number: int, request: DecodeRequest) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._request += 1
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        self._running[number] = self._pipe.add_request(self._request, ids, config)

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipe.step()
        # One entry a request, also where a handle holds several outputs: with its last token a request is dropped.
        generated: dict[int, list[int]] = {number: [] for number in self._running}
        for number, handle in self._running.items():
            while handle.can_read():
                for output in handle.read().values():
                    generated[number] += output.generated_ids
        return list(generated.items())

    def drop(self, number: int) -> None:
        del self._running[number]


if __name__ == "__main__":
    folder, precision, threads, cache, shares = sys.argv[1:]
    serve_decoding(partial(replay_in_steps, Pipeline(folder, precision, int(threads), cache, shares == "1")))
