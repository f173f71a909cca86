"""Our decode loop without a server, asked as bench.peers.decode_worker says.

Tokens become text here as they do in the backend. Beside them it reports iterations, and the time that the generating
thread spends in the model, in sampling, and elsewhere.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import numpy as np

from bench.decode_ours import MAX_LENGTH, SLOTS
from bench.peers.decode_worker import Ask, Replayed, send
from shapeshift.engines.hardware import cores
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.fused_decode.admission import FirstComeFirstServed
from shapeshift.fused_decode.detokenize import TextStream, token_bytes
from shapeshift.fused_decode.loop import DecodeLoop
from shapeshift.fused_decode.model import DecodeModel
from shapeshift.fused_decode.sequence import GenerateParameters, Sequence


class Noted(TextStream):
    """Notes the instant of every token and the token itself."""

    def __init__(self, table: list[bytes]) -> None:
        super().__init__(table)
        self.stamps: list[float] = []
        self.tokens: list[int] = []

    def add(self, token: int) -> str:
        self.stamps.append(time.perf_counter())
        self.tokens.append(token)
        return super().add(token)


class InProcess:
    """One loop, asked by a thread that submits requests as they come."""

    def __init__(self, folder: Path, precision: str, kernels: Path) -> None:
        self._table = token_bytes(folder / TOKENIZER_FILE)
        model = DecodeModel.load(
            folder,
            precision=precision,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            threads=cores(),
            cache_dir=kernels,
            log=lambda text: print(text, file=sys.stderr),
        )
        self._ended: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        admission: FirstComeFirstServed[Sequence] = FirstComeFirstServed(1024, 1 << 20)
        self._loop = DecodeLoop(model, admission, self._deliver, lambda text: print(text, file=sys.stderr))
        self._loop.start()

    def replay(self, asks: list[Ask]) -> Replayed:
        before = self._counted()
        noted = [Noted(self._table) for _ in asks]
        start = send(asks, lambda number, ask: self._submit(ask, noted[number]))
        for _ in asks:
            sequence = self._ended.get()
            if sequence.error is not None:
                raise sequence.error
        stamps = [[at - start for at in text.stamps] for text in noted]
        after = self._counted()
        return Replayed(stamps, [text.tokens for text in noted], {name: after[name] - before[name] for name in after})

    def _submit(self, ask: Ask, text: Noted) -> None:
        wanted = GenerateParameters(max_tokens=ask.new, temperature=0.0, ignore_eos=True)
        prompt = np.array(ask.prompt, np.int64)
        self._loop.submit(Sequence("", prompt, wanted, text, max_length=MAX_LENGTH, stream=True))

    def _deliver(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.ended:
                self._ended.put(sequence)

    def _counted(self) -> dict[str, float]:
        meters = self._loop.meters
        counts, _ = meters.iteration_ms.totals()
        parts = {f"{part}_ms": counter.value for part, counter in meters.parts.items()}
        return {"iterations": float(counts[-1]), "moves": meters.moves.value, **parts}
