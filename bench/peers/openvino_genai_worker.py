"""OpenVINO GenAI's continuous batching: `python -m bench.peers.openvino_genai_worker FOLDER PRECISION THREADS CACHE`.

Runs in its own environment, on a folder made by openvino_genai_export.py. CACHE: the precision of keys and values.
The scheduler keeps its defaults, except for the prefix cache, which is off: no two prompts are alike.
"""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.protocol import DecodeRequest, Replayed, send, serve_decoding

CACHE_GB = 2
SEQUENCES = 32


class Pipeline:
    """Requests join between two steps."""

    def __init__(self, folder: str, precision: str, threads: int, cache: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = SEQUENCES
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": cache,
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._request = 0

    def replay(self, requests: list[DecodeRequest]) -> Replayed:
        due: queue.SimpleQueue[tuple[int, DecodeRequest]] = queue.SimpleQueue()
        start = send(requests, lambda number, request: due.put((number, request)))
        replayed = Replayed.empty(len(requests))
        stamps, tokens = replayed.stamps, replayed.tokens
        running: dict[int, Any] = {}
        left, steps = len(requests), 0
        while left:
            while not due.empty() or not running:
                number, request = due.get()
                running[number] = self._add(request)
            self._pipe.step()
            steps += 1
            now = time.perf_counter() - start
            for number, handle in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[number] += output.generated_ids
                        stamps[number] += [now] * len(output.generated_ids)
                if len(tokens[number]) >= requests[number].new_tokens:
                    del running[number]
                    left -= 1
        replayed.extra["iterations"] = steps
        return replayed

    def _add(self, request: DecodeRequest) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._request += 1
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        return self._pipe.add_request(self._request, ids, config)


if __name__ == "__main__":
    folder, precision, threads, cache = sys.argv[1:]
    serve_decoding(Pipeline(folder, precision, int(threads), cache).replay)
