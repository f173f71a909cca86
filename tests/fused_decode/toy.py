"""A small model whose next token depends on its whole context, and functions that predict its text."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, CopyStates, StepBatch, blocks_of
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.policy.speculation import IterationTimes
from shapeshift.fused_decode.request import ABORT, Request, SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?0123456789"
VOCABULARY = len(LETTERS) + 1
EOS = VOCABULARY - 1
TABLE = [letter.encode() for letter in LETTERS] + [b""]
_STATES = 997


def state_of(context: Sequence[int]) -> int:
    """A number that depends on every token of the context and on its place."""
    state = 1
    for token in context:
        state = (state * 31 + int(token) + 7) % 1_000_003
    return state


class ToyRuntime:
    """Keeps its input block by block and asserts that it comes in order.

    With `ahead` it is given steps before the tokens of the last one are known, as a GPU is: `latest` is what it was fed
    for each slot.

    The tokens of a row's blocks select its logits from a fixed table. The end-of-sequence token is unlikely before
    `eos_at` tokens, and certain from then on. `before` is called when a step begins.
    """

    longest_step_s = 0.0
    shares_prefixes = True

    def __init__(
        self,
        slots: int = 4,
        max_length: int = 64,
        seed: int = 0,
        blocks: int = 0,
        repeats: bool = False,
        ahead: bool = False,
    ) -> None:
        """repeats: four times in five the likeliest token is the one that followed the last token before."""
        rng = np.random.default_rng(seed)
        self.vocab_size = VOCABULARY
        self.max_length = max_length
        self.slots = slots
        self.eos_ids = frozenset({EOS})
        self.blocks = blocks or slots * blocks_of(max_length)
        self.cache = np.full((self.blocks, BLOCK_TOKENS), -1)
        self.spans = [0] * slots
        self.copied = 0
        self.logits = rng.standard_normal((_STATES, VOCABULARY)).astype(np.float32) * 2
        self.logits[:, EOS] = -30
        self.repeats = repeats
        self.eos_at: int | None = None
        self.steps: list[tuple[list[int], list[int]]] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.pace: threading.Semaphore | None = None
        self.fail: Exception | None = None
        self.before: Callable[[], object] = lambda: None
        self.is_closed, self.is_ready = False, True
        self.latest = np.zeros(slots, np.int64)
        self.fed_steps = 0
        self.feed: Callable[[torch.Tensor], None] | None = self._feed if ahead else None
        self.copy_states: CopyStates | None = None
        self._wanted_slots: list[int] = []

    def ready(self) -> bool:
        return self.is_ready

    def close(self) -> None:
        self.is_closed = True

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.before()
        self.entered.release()
        assert self.open.wait(120)
        assert self.pace is None or self.pace.acquire(timeout=30)
        if self.fail is not None:
            raise self.fail
        slots, starts, lengths = batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist()
        assert len(set(slots)) == len(slots), "a batch has a slot twice"
        assert batch.tokens.dtype == torch.int64 and batch.slots.dtype == batch.starts.dtype == torch.int32
        assert int(batch.lengths.sum()) == len(batch.tokens)
        self.steps.append((slots, lengths))
        tokens = batch.tokens.tolist()
        if batch.fed is not None:
            assert self.feed is not None and batch.fed.dtype == torch.bool and len(batch.fed) == len(tokens)
            self.fed_steps += 1
            owners = np.repeat(slots, lengths)
            for place in batch.fed.nonzero()[:, 0].tolist():
                tokens[place] = int(self.latest[owners[place]])
        self._wanted_slots = [slots[row] for row in batch.logit_rows.tolist()]
        if max(tokens) >= self.vocab_size:
            raise IndexError("index out of range in self")
        spans = (batch.starts + batch.lengths if batch.spans is None else batch.spans).tolist()
        assert batch.blocks is not None
        contexts, written = [], []
        for slot, start, length, span, blocks in zip(slots, starts, lengths, spans, batch.blocks.numpy(), strict=True):
            self.spans[slot] = span
            assert start + length <= span <= self.max_length, "a text becomes longer than said"
            assert length >= 1 and start + length <= self.max_length
            text = self.cache[blocks].ravel()
            assert (text[:start] >= 0).all(), "a text does not continue where it ended"
            text[start : start + length] = tokens[:length]
            used = blocks[: blocks_of(start + length)]
            self.cache[used] = text.reshape(-1, BLOCK_TOKENS)[: len(used)]
            written += used[start // BLOCK_TOKENS :].tolist()
            tokens = tokens[length:]
            contexts.append(text[: start + length])
        assert len(set(written)) == len(written), "two rows write into one block"
        rows = [self.row(contexts[row]) for row in batch.logit_rows.tolist()]
        firsts = np.cumsum([0, *lengths])
        for place in [] if batch.further is None else batch.further.tolist():
            row = int(np.searchsorted(firsts, place, side="right")) - 1
            rows.append(self.row(contexts[row][: starts[row] + place - int(firsts[row]) + 1]))
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, VOCABULARY), np.float32))

    def _feed(self, tokens: torch.Tensor) -> None:
        assert len(tokens) == len(self._wanted_slots)
        self.latest[self._wanted_slots] = tokens.numpy()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not {*sources} & {*targets} and len({*targets}) == len(targets)
        self.cache[list(targets)] = self.cache[list(sources)]
        self.copied += len(targets)

    def row(self, context: Sequence[int]) -> np.ndarray:
        """The logits after `context`."""
        state = state_of(context)
        made = self.logits[state % _STATES].copy()
        if self.repeats and state % 5 and (again := _repeated(context)) is not None:
            made[again] += 9
        if self.eos_at is not None and len(context) >= self.eos_at:
            made[EOS] = 50
        return made

    def greedy(self, prompt: Sequence[int] | np.ndarray, count: int) -> list[int]:
        """The tokens that follow `prompt` when nothing else runs, with the end of sequence."""
        context = [int(token) for token in prompt]
        for _ in range(count):
            context.append(int(self.row(context).argmax()))
            if context[-1] == EOS:
                break
        return context[len(prompt) :]

    def text(self, prompt: Sequence[int] | np.ndarray, count: int) -> str:
        """The same as text."""
        return "".join(LETTERS[token] for token in self.greedy(prompt, count) if token != EOS)


def _repeated(context: Sequence[int]) -> int | None:
    """The token that followed the last token of the context where it occurred last; None where it did not."""
    earlier = np.flatnonzero(np.asarray(context[:-1]) == context[-1])
    return int(context[earlier[-1] + 1]) if earlier.size else None


def ids(text: str) -> np.ndarray:
    return np.array([LETTERS.index(letter) for letter in text], dtype=np.int64)


class Run:
    """A loop over a toy, driven step by step by the test, with the requests that it has delivered and finished."""

    def __init__(self, runtime: ToyRuntime | None = None, requests: int = 1000, **options: object):
        self.runtime = runtime or ToyRuntime()
        self.finished: list[Request] = []
        self.delivered: list[Request] = []
        self.log: list[str] = []
        self.request_type: type[Request] = Request
        admission = options.pop("admission", FirstComeFirstServed(requests))
        caching = bool(options.pop("caching", False))
        pool = BlockPool(self.runtime.blocks, caching=caching)
        chosen: Any = {"admission": admission, "pool": pool, **options}
        self.loop = DecodeLoop(self.runtime, deliver=self._note, log=self.log.append, **chosen)

    def _note(self, updated: list[Request]) -> None:
        assert len(set(updated)) == len(updated)
        self.finished += [request for request in updated if request.is_finished]
        self.delivered += updated

    def request(
        self, prompt: str = "abc", stream: bool = False, latency_ms: float | None = None, **fields: object
    ) -> Request:
        given = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})  # type: ignore[arg-type]
        text = TextStream(TABLE, given.stop)
        length = self.runtime.max_length
        return self.request_type(
            "one", ids(prompt), given, text, max_length=length, stream=stream, latency_ms=latency_ms
        )

    def submit(self, *arguments: object, **fields: object) -> Request:
        made = self.request(*arguments, **fields)  # type: ignore[arg-type]
        self.loop.submit(made)
        return made

    def until_idle(self, limit: int = 10_000, pause_s: float = 0.0) -> int:
        """Step until no request is left, with a pause after each step; the number of iterations."""
        for count in range(limit):
            self.loop.check_integrity()
            if not self.loop.step():
                self.loop.check_integrity()
                assert self.loop.slots.used == 0 and len(self.loop.admission) == 0
                return count
            if pause_s:
                time.sleep(pause_s)
        raise AssertionError("the loop does not become idle")


class FreeTokens(IterationTimes):
    """Every iteration takes as long, so that all that is likely is verified."""

    def knows(self, tokens: int) -> bool:
        return True

    def estimate(self, tokens: int) -> float:
        return 1.0

    def waste(self, seconds: float) -> None:
        """Look-ups cost nothing either."""


def text_of(request: Request) -> str:
    """The answer so far."""
    return "".join(request.parts)


def beams_alone(runtime: ToyRuntime, prompt: str, **fields: object) -> list[tuple[list[int], float]]:
    """The tokens and scores that a request with beam search gets when nothing else runs."""
    own = ToyRuntime(slots=8, max_length=runtime.max_length, repeats=runtime.repeats)
    own.logits, own.eos_at = runtime.logits, runtime.eos_at
    run = Run(own)
    request = run.submit(prompt, **fields)
    run.until_idle()
    return found_by(request)


def found_by(request: Request) -> list[tuple[list[int], float]]:
    """The tokens and scores of the texts that a beam search returns, the best one first."""
    assert request.beams is not None and request.is_finished and request.error is None
    return [(one.tokens.tolist(), one.score) for one in request.beams.best]


def drive_at_random(run: Run, rng: random.Random, iterations: int, prompt: Callable[[], str], longest: int) -> None:
    """Submit and end requests between iterations; integrity is checked after each, every answer in the end.

    One in 16 has beam search. prompt: makes the next prompt; longest: most tokens of an answer.
    """
    made: list[tuple[Request, str, int]] = []
    searches: list[tuple[Request, str, dict[str, object]]] = []
    table = run.loop.slots
    for _ in range(iterations):
        if rng.random() < 0.2 and len(run.loop.admission) < 20:
            text, count = prompt(), rng.randint(1, longest)
            room = min(table.pool.count // blocks_of(min(len(text) + count, run.runtime.max_length)), len(table), 4)
            if rng.random() < 1 / 16 and room > 1:
                beams = rng.randint(2, room)
                fields: dict[str, object] = {
                    "max_tokens": count,
                    "num_beams": beams,
                    "num_return_sequences": rng.randint(1, beams),
                    "early_stopping": rng.choice((True, False, "never")),
                }
                searches.append((run.submit(text, **fields), text, fields))
            else:
                made.append((run.submit(text, max_tokens=count), text, count))
        if rng.random() < 0.02 and made:
            run.loop.end(rng.choice([one[0] for one in (*made, *searches)]), ABORT)
        run.loop.step()
        run.loop.check_integrity()
    run.until_idle()
    for request, text, count in made:
        whole = run.runtime.text(ids(text), min(count, run.runtime.max_length - len(text)))
        assert request.error is None and whole.startswith(text_of(request))
        assert request.finish_reason == ABORT or text_of(request) == whole
    for request, text, fields in searches:
        assert request.finish_reason == ABORT or found_by(request) == beams_alone(run.runtime, text, **fields)


def save_tokenizer(folder: Path, added: tuple[str, ...] = ()) -> Path:
    """Write a tokenizer.json with the ids of the toy, one for each letter; returns the folder.

    added: further special tokens, which the toy's embedding lacks.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter.replace(" ", "Ġ"): number for number, letter in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<|end|>", *added)])
    assert made.token_to_id("<|end|>") == EOS
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder
