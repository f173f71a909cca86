"""A small model whose next token depends on everything it has read, and the means to predict what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Some
from pathlib import Path

import numpy as np
import torch

from shapeshift.fused_decode.admission import FirstComeFirstServed
from shapeshift.fused_decode.detokenize import TextStream
from shapeshift.fused_decode.loop import DecodeLoop
from shapeshift.fused_decode.sequence import GenerateParameters, Sequence
from shapeshift.fused_decode.step import StepBatch

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?0123456789"
VOCABULARY = len(LETTERS) + 1
EOS = VOCABULARY - 1
TABLE = [letter.encode() for letter in LETTERS] + [b""]
_STATES = 997


def state_of(context: Some[int]) -> int:
    """A number that every token of the context, and its place, has a say in."""
    state = 1
    for token in context:
        state = (state * 31 + int(token) + 7) % 1_000_003
    return state


class ToyRuntime:
    """Keeps what it was given, slot by slot, and insists that it is given in order.

    The logits of a row are drawn from a fixed table by all tokens that its slot holds. The end-of-sequence token
    is unlikely unless `eos_at` says after how many tokens it comes.
    """

    def __init__(self, slots: int = 4, max_length: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = VOCABULARY
        self.max_length = max_length
        self.slots = slots
        self.eos_ids = frozenset({EOS})
        self.cache: list[list[int]] = [[] for _ in range(slots)]
        self.logits = rng.standard_normal((_STATES, VOCABULARY)).astype(np.float32) * 2
        self.logits[:, EOS] = -30
        self.eos_at: int | None = None
        self.steps: list[tuple[list[int], list[int]]] = []
        self.moves: list[tuple[int, int, int]] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.pace: threading.Semaphore | None = None
        self.fail: Exception | None = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.entered.release()
        assert self.open.wait(30)
        assert self.pace is None or self.pace.acquire(timeout=30)
        if self.fail is not None:
            raise self.fail
        slots, starts, lengths = batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist()
        assert len(set(slots)) == len(slots), "a slot stands twice in a batch"
        assert batch.tokens.dtype == torch.int64 and batch.slots.dtype == batch.starts.dtype == torch.int32
        assert int(batch.lengths.sum()) == len(batch.tokens)
        self.steps.append((slots, lengths))
        tokens = batch.tokens.tolist()
        for slot, start, length in zip(slots, starts, lengths, strict=True):
            assert length >= 1 and start + length <= self.max_length
            assert start == 0 or start == len(self.cache[slot]), "a slot is not continued where it ended"
            self.cache[slot][start:] = tokens[:length]
            tokens = tokens[length:]
        rows = [self.row(self.cache[slots[row]]) for row in batch.wanted.tolist()]
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, VOCABULARY), np.float32))

    def row(self, context: Some[int]) -> np.ndarray:
        """The logits after `context`."""
        made = self.logits[state_of(context) % _STATES].copy()
        if self.eos_at is not None and len(context) >= self.eos_at:
            made[EOS] = 50
        return made

    def move(self, source: int, target: int, length: int) -> None:
        self.moves.append((source, target, length))
        assert len(self.cache[source]) >= length
        self.cache[target] = self.cache[source][:length]
        self.cache[source] = []

    def greedy(self, prompt: Some[int], count: int) -> list[int]:
        """The tokens that follow `prompt` when nothing else runs, end-of-sequence included."""
        context = [int(token) for token in prompt]
        for _ in range(count):
            context.append(int(self.row(context).argmax()))
            if context[-1] == EOS:
                break
        return context[len(prompt) :]

    def text(self, prompt: Some[int], count: int) -> str:
        """The same as text."""
        return "".join(LETTERS[token] for token in self.greedy(prompt, count) if token != EOS)


def ids(text: str) -> np.ndarray:
    return np.array([LETTERS.index(letter) for letter in text], dtype=np.int64)


class Run:
    """A loop over a toy, driven step by step by the test; `said` holds what was delivered."""

    def __init__(self, runtime: ToyRuntime | None = None, requests: int = 1000, tokens: int = 10**6, **options: object):
        self.runtime = runtime or ToyRuntime()
        self.ended: list[Sequence] = []
        self.spoken: list[Sequence] = []
        self.log: list[str] = []
        admission: FirstComeFirstServed[Sequence] = FirstComeFirstServed(requests, tokens)
        self.loop = DecodeLoop(self.runtime, admission, self._note, self.log.append, **options)  # type: ignore[arg-type]

    def _note(self, sequences: list[Sequence]) -> None:
        assert len(set(sequences)) == len(sequences)
        self.ended += [sequence for sequence in sequences if sequence.ended]
        self.spoken += sequences

    def sequence(self, prompt: str = "abc", stream: bool = False, latency_ms: float | None = None, **fields: object):
        given = GenerateParameters(**{"temperature": 0.0, "max_tokens": 8, **fields})  # type: ignore[arg-type]
        text = TextStream(TABLE, given.stop)
        length = self.runtime.max_length
        return Sequence("one", ids(prompt), given, text, max_length=length, stream=stream, latency_ms=latency_ms)

    def submit(self, *arguments: object, **fields: object) -> Sequence:
        made = self.sequence(*arguments, **fields)  # type: ignore[arg-type]
        self.loop.submit(made)
        return made

    def until_idle(self, limit: int = 10_000, pause_s: float = 0.0) -> int:
        """Step until nothing is left, with a pause after each; the number of iterations."""
        for count in range(limit):
            self.loop.check_integrity()
            if not self.loop.step():
                self.loop.check_integrity()
                assert self.loop.slots.used == 0 and len(self.loop.admission) == 0
                return count
            time.sleep(pause_s)
        raise AssertionError("the loop does not come to rest")


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer.json whose ids are those of the toy, one for each letter; the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter.replace(" ", "Ġ"): number for number, letter in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    assert made.token_to_id("<|end|>") == EOS
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder
