"""Our decode loop without a server, as `bench.peers.protocol` has it.

Tokens become text as in the backend. Also reported: iterations, and the generating thread's time in the model, in
sampling, and elsewhere.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import numpy as np

from bench.adapter_cache import random_adapters
from bench.fused_decode.loads import SLOTS
from bench.peers.protocol import MOST_TOKENS, DecodeRequest, Replayed, send
from shapeshift.adapter_cache.lora import native
from shapeshift.adapter_cache.lora.batch import LoraHook
from shapeshift.engines.hardware import cores
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream, token_bytes
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams


def print_error(text: str) -> None:
    print(text, file=sys.stderr)


class RecordedText(TextStream):
    """Records every token and its instant."""

    def __init__(self, table: list[bytes]) -> None:
        super().__init__(table)
        self.stamps: list[float] = []
        self.tokens: list[int] = []

    def add(self, token: int) -> str:
        self.stamps.append(time.perf_counter())
        self.tokens.append(token)
        return super().add(token)


class InProcess:
    """One loop, to which a thread submits requests when they are due."""

    def __init__(
        self, folder: Path, precision: str, kernels: Path, max_length: int, shares: bool, adapters: list[Path]
    ) -> None:
        self._max_length = max_length
        self._table = token_bytes(folder / TOKENIZER_FILE)
        model = DecodeModel.load(
            folder,
            ModelOptions(
                precision=precision,
                slots=SLOTS,
                max_length=max_length,
                # As many as a server that has run for a while has used: those of long prompts are used again.
                blocks=MOST_TOKENS // BLOCK_TOKENS if shares else 0,
                threads=cores(),
                cache_dir=kernels,
            ),
            print_error,
        )
        self._ended: queue.SimpleQueue[Request] = queue.SimpleQueue()
        admission: FirstComeFirstServed[Request] = FirstComeFirstServed(1024)
        self._adapters = len(adapters)
        if adapters:
            memory, places = random_adapters.loaded(model, folder, adapters)
            lora = native.load(kernels, print_error)
            assert lora is not None, "no kernels"
            model.linear_hook = LoraHook(memory, lambda numbers: ([places[number] for number in numbers], 0), lora)
        pool = BlockPool(model.blocks, caching=shares)
        self._loop = DecodeLoop(model, admission, self._deliver, print_error, pool=pool)
        self._loop.start()

    def replay(self, requests: list[DecodeRequest], num_beams: int = 1) -> Replayed:
        before = self._counted()
        texts = [RecordedText(self._table) for _ in requests]
        start = send(requests, lambda number, request: self._submit(number, request, texts[number], num_beams))
        for _ in requests:
            request = self._ended.get()
            if request.error is not None:
                raise request.error
            if request.beams is not None:
                # The whole answer is known now.
                for token in request.beams.best[0].tokens.tolist():
                    request.text.add(token)
        stamps = [[at - start for at in text.stamps] for text in texts]
        after = self._counted()
        return Replayed(stamps, [text.tokens for text in texts], {name: after[name] - before[name] for name in after})

    def _submit(self, number: int, request: DecodeRequest, text: RecordedText, num_beams: int) -> None:
        params = SamplingParams(max_tokens=request.new_tokens, temperature=0.0, ignore_eos=True, num_beams=num_beams)
        prompt, stream = np.array(request.prompt, np.int64), num_beams == 1
        submitted = Request("", prompt, params, text, max_length=self._max_length, stream=stream)
        if self._adapters:
            submitted.adapter_id = number % self._adapters
        self._loop.submit(submitted)

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            if request.is_finished:
                self._ended.put(request)

    def _counted(self) -> dict[str, float]:
        metrics = self._loop.metrics
        counts, _ = metrics.iteration_ms.totals()
        parts = {f"{part}_ms": counter.value for part, counter in metrics.parts.items()}
        return {"iterations": float(counts[-1]), **parts}
