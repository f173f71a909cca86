"""llama.cpp's batches: `python -m bench.peers.llama_cpp_worker FILE THREADS CACHE MAX_LENGTH [exact]`.

Runs in its own environment, on a file made by llama_cpp_export.py. CACHE: the type of keys and values; MAX_LENGTH:
the tokens of a request. Requests join between two calls of the library; each call has a token of every request that
runs, or all of a prompt. The sequences share one cache, which is far faster on a CPU than one for each. The most likely
token is taken. exact: without flash attention, which rounds to f16 whatever the cache has.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import partial

import llama_cpp as library
import numpy as np

from bench.peers.protocol import MOST_TOKENS, SEQUENCES, DecodeRequest, replay_in_steps, serve_decoding

CACHES = {"f32": 0, "f16": 1, "q8_0": 8}


@dataclass
class Running:
    """A request's sequence in the cache, the tokens that the cache lacks, and how many it has."""

    sequence: int
    waiting: list[int]
    cached: int = 0
    row: int = -1


class Batches:
    """Requests join between two calls."""

    most = SEQUENCES

    def __init__(self, file: str, threads: int, cache: str, max_length: int, exact: bool = False) -> None:
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = min(SEQUENCES * max_length, MOST_TOKENS)
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = CACHES[cache]
        params.kv_unified = True
        if exact:
            params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp refuses the model or its settings"
        self._memory = library.llama_get_memory(self._context)
        self._batch = library.llama_batch_init(params.n_batch, 0, 1)
        self._running: dict[int, Running] = {}
        self._free = list(range(SEQUENCES))
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def add(self, number: int, request: DecodeRequest) -> None:
        self._running[number] = Running(self._free.pop(), list(request.prompt))

    def step(self) -> list[tuple[int, list[int]]]:
        batch, at = self._batch, 0
        for one in self._running.values():
            for token in one.waiting:
                batch.token[at], batch.pos[at] = token, one.cached
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, one.sequence, 0
                one.cached += 1
                at += 1
            one.row = at - 1
            batch.logits[one.row] = 1
        batch.n_tokens = at
        answered = library.llama_decode(self._context, batch)
        assert answered == 0, f"llama_decode returned {answered}"
        for one in self._running.values():
            one.waiting = [self._most_likely(one.row)]
        return [(number, one.waiting) for number, one in self._running.items()]

    def drop(self, number: int) -> None:
        sequence = self._running.pop(number).sequence
        library.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free.append(sequence)

    def _most_likely(self, row: int) -> int:
        logits = library.llama_get_logits_ith(self._context, row)
        place = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(place, (self._vocabulary,)).argmax())


if __name__ == "__main__":
    file, threads, cache, max_length, *exact = sys.argv[1:]
    batches = Batches(file, int(threads), cache, int(max_length), bool(exact))
    serve_decoding(partial(replay_in_steps, batches))
