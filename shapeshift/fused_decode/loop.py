"""The decode loop: all running requests share each iteration of the model (Flover, Algorithm 2)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shapeshift.errors import EngineError, OverloadedError
from shapeshift.fused_decode.admission import Admission
from shapeshift.fused_decode.batching import Step, compose
from shapeshift.fused_decode.departures import Departures, Why
from shapeshift.fused_decode.meters import MODEL, REST, SAMPLING, LoopMeters
from shapeshift.fused_decode.sampling import Sampler
from shapeshift.fused_decode.sequence import LENGTH, STOP, Sequence
from shapeshift.fused_decode.slots import DECODE, PREFILL, Ground, SlotTable
from shapeshift.fused_decode.step import Runtime
from shapeshift.serving.log import Log

Deliver = Callable[[list[Sequence]], None]
Array = npt.NDArray[Any]
_LOOK_AGAIN_S = 0.02


class DecodeLoop:
    """One thread that decides, runs and records, iteration after iteration, while there is a request.

    deliver(sequences) is called on that thread, at most twice an iteration, with the requests that have text to
    send or have ended, each of the latter once. It must neither block nor raise.
    """

    def __init__(
        self,
        runtime: Runtime,
        admission: Admission[Sequence],
        deliver: Deliver,
        log: Log,
        *,
        prefill_tokens: int = 256,
        compaction: bool = True,
        ground: Ground | None = None,
    ) -> None:
        self.admission = admission
        self.slots = SlotTable(runtime.slots, runtime.max_length, ground)
        self.meters = LoopMeters()
        self._runtime = runtime
        self._sampler = Sampler(self.slots.sampling, self.slots.tokens, runtime.vocab_size)
        self._deliver = deliver
        self._log = log
        self._prefill_tokens = prefill_tokens
        self._compaction = compaction
        self._is_eos = np.isin(np.arange(runtime.vocab_size), list(runtime.eos_ids))
        self._reading: dict[Sequence, None] = {}
        self._departures = Departures()
        self._outbox: deque[Sequence] = deque()
        self._recorded = 0.0
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="decode", daemon=True)

    # For any thread.

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Let `sequence` wait for a slot; OverloadedError when it may not."""
        self.admission.submit(sequence)
        self._departures.watch(sequence)
        self._wake.set()

    def end(self, sequence: Sequence, why: Why) -> None:
        """End `sequence` before its time, with a finish reason or an error; it leaves within an iteration."""
        self._departures.demand(sequence, why)
        self._wake.set()

    def wake(self) -> None:
        """What waits may now be admitted: look again."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer whatever waits or runs with UNAVAILABLE and end the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    # For the generating thread alone.

    def step(self) -> bool:
        """One iteration: decide, run, record; False where there was nothing to compute."""
        start = time.monotonic()
        work = self._decide(start)
        if work is None:
            return False
        running = time.monotonic()
        logits = self._runtime.forward(work.batch)
        choosing = time.monotonic()
        tokens, good = self._sampler.choose(logits, work.wanted, self.slots.length[work.wanted])
        recording = time.monotonic()
        self._record(work, tokens, good, recording)
        self._measure(start, running, choosing, recording, time.monotonic())
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when slots, what is being read and what waits contradict one another."""
        self.slots.check_integrity()
        self.admission.check_integrity()
        phases = zip(self.slots.owners, self.slots.phase, strict=True)
        assert set(self._reading) == {owner for owner, phase in phases if phase == PREFILL}, "a prompt is lost"

    def _serve(self) -> None:
        while not self._closing:
            try:
                while not self._closing and self.step():
                    pass
                self.check_integrity()
                # Who waits although no request runs waits for something else than a slot, or for its deadline.
                self._wake.wait(_LOOK_AGAIN_S if len(self.admission) else None)
                # Before anything is looked at: what comes after the look sets it again.
                self._wake.clear()
            except Exception as error:  # noqa: BLE001  what goes wrong costs the running requests, not the loop
                self._log(f"an iteration failed, its requests are lost: {type(error).__name__}: {error}")
                self._abandon(EngineError(f"the decode loop failed: {error}"))
        unloading = OverloadedError("the model is being unloaded; retry elsewhere")
        for sequence in self.admission.close():
            self._leave(sequence, unloading)
        self._abandon(unloading)

    def _decide(self, now: float) -> Step | None:
        """Let go who must leave, fill free slots, close the gaps that are left, and make up the batch."""
        self._let_go(now)
        for sequence in self.admission.squash():
            self._reading.pop(sequence, None)
            self.slots.set_aside(sequence)
        self.slots.begin()
        for sequence in self.admission.admit(self.slots.free):
            sequence.admitted = sequence.admitted or now
            self.slots.seat(sequence)
            self._reading[sequence] = None
        if self._compaction and (gaps := self.slots.scattered()):
            for source, target in gaps.moves:
                self._move(source, target)
        self._flush()
        return compose(self.slots, self._reading, self._prefill_tokens) if self.slots.used else None

    def _record(self, work: Step, tokens: Array, good: Array, now: float) -> None:
        """Write the new tokens down and let go whoever has come to an end."""
        table, meters, wanted = self.slots, self.meters, work.wanted
        decoding = int((table.phase[wanted] == DECODE).sum())
        meters.prompt_tokens.add(int(work.lengths.sum()) - decoding)
        meters.generated_tokens.add(len(wanted))
        if decoding:
            # Every decoding request got its last token when the iteration before was recorded.
            meters.between_tokens_ms.observe((now - self._recorded) * 1e3, decoding)
        self._recorded = now
        table.advance(work.slots, work.lengths, wanted, tokens)
        eos = self._is_eos[tokens] & ~table.ignore_eos[wanted]
        full = table.length[wanted] >= table.end[wanted]
        columns = (wanted.tolist(), tokens.tolist(), eos.tolist(), full.tolist(), good.tolist())
        for slot, token, is_eos, is_full, is_good in zip(*columns, strict=True):
            sequence = table.owners[slot]
            assert sequence is not None
            self._reading.pop(sequence, None)
            if not sequence.generated:
                self._first(sequence, now)
            sequence.generated += 1
            if not is_good:
                self._leave(sequence, EngineError("the model's logits are not finite"))
            elif is_eos or self._speak(sequence, token):
                self._leave(sequence, STOP)
            elif is_full:
                self._leave(sequence, LENGTH)
        self._let_go(now)
        self._flush()

    def _first(self, sequence: Sequence, now: float) -> None:
        sequence.first_token = now
        self.meters.first_token_ms.observe((now - sequence.arrived) * 1e3)

    def _speak(self, sequence: Sequence, token: int) -> bool:
        """Add a token's text to the answer; whether a stop string is complete."""
        text = sequence.text.add(token)
        if text:
            sequence.parts.append(text)
            if sequence.stream:
                self._outbox.append(sequence)
        return sequence.text.stopped

    def _let_go(self, now: float) -> None:
        for sequence, why in self._departures.due(now):
            self._leave(sequence, why)

    def _leave(self, sequence: Sequence, why: Why) -> None:
        """End `sequence`, wherever it is."""
        if sequence.slot is None:
            self.admission.withdraw(sequence)
        else:
            self.slots.release(sequence)
            self.admission.finished(sequence)
            self._reading.pop(sequence, None)
        sequence.close(why)
        self._outbox.append(sequence)

    def _abandon(self, error: Exception) -> None:
        """End all running requests with `error`; the slots are free afterwards whatever state they were in."""
        running = [owner for owner in self.slots.owners if owner is not None]
        self.slots.clear()
        self._reading.clear()
        for sequence in running:
            self.admission.finished(sequence)
            if not sequence.ended:
                sequence.close(error)
                self._outbox.append(sequence)
        self._flush()

    def _move(self, source: int, target: int) -> None:
        length = self.slots.move(source, target, self._runtime.move)
        self.meters.moves.add()
        self.meters.moved_tokens.add(length)

    def _flush(self) -> None:
        if self._outbox:
            # A request that spoke and ended is delivered once.
            self._deliver(list(dict.fromkeys(self._outbox)))
            self._outbox.clear()

    def _measure(self, start: float, running: float, choosing: float, recording: float, end: float) -> None:
        parts = self.meters.parts
        parts[MODEL].add((choosing - running) * 1e3)
        parts[SAMPLING].add((recording - choosing) * 1e3)
        parts[REST].add((running - start + end - recording) * 1e3)
        self.meters.iteration_ms.observe((end - start) * 1e3)
