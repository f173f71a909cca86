"""What the decode loop asks of a model, and what another technique may add: memory in idle slots, low-rank terms.

A *slot* holds the keys and values of one text, up to `max_length` tokens: that of a running request, or of one of its
beams. A *row* is a text's share of one iteration: first a chunk of its prompt, later a token and those proposed behind
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""The linears of a layer. Queries, keys and values are one linear, stacked in this order; so are gate and up."""
LINEARS = 4


BLOCK_TOKENS = 16
"""Tokens of a block of the cache."""


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


CopyStates = Callable[[Sequence[int], Sequence[int]], None]
"""See `Runtime.copy_states`."""


@dataclass
class Draws:
    """Tokens that a runtime may choose together with a step, for rows of which nothing changes the logits.

    columns  temperature FLOAT32, top_k INT64, top_p and min_p FLOAT32, seed INT64, [slots] each: see `SamplingParams`;
             then INT64 and BOOL [slots]: the runtime writes the token of each row to its slot, and whether its logits
             were finite
    is_done  the runtime says that it has
    """

    columns: list[torch.Tensor]
    is_done: bool = False


@dataclass(frozen=True)
class StepBatch:
    """Rows of one iteration: those that decode and chunks of prompts side by side.

    tokens   INT64 [total]        the tokens of all rows, row after row
    slots    INT32 [rows]         slot of each row's text; no slot twice
    starts   INT32 [rows]         tokens of that text in the cache: the position of the row's first token
    lengths  INT32 [rows]         tokens of the row in this step, at least 1
    logit_rows  INT64 [n]         rows after whose last token logits are wanted; may be empty
    adapters INT32 [rows]         the adapter of each row, -1 for none; None: no row has one
    spans    INT32 [rows]         tokens that the text of each row can have in the end; None: it ends with this step
    blocks   INT32 [rows, n]      blocks of the cache that hold the text of each row, in order, `BLOCK_TOKENS` tokens
                                  each; what lies behind the row's last token is any block. None: as many blocks as
                                  `max_length` tokens need belong to each slot, in order
    further  INT64 [n]            places in `tokens` of further tokens after which logits are wanted; None: none
    fed      BOOL [total]         tokens that are not known here yet, whatever `tokens` says: each is the one that
                                  `Runtime.feed` was given last for its row's slot. None: all are known
    draws    how a token after each of `logit_rows` may be chosen; None: none is

    A batch may come again after its step, with other tokens and its starts advanced.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    logit_rows: torch.Tensor
    adapters: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    further: torch.Tensor | None = None
    fed: torch.Tensor | None = None
    draws: Draws | None = None


class Runtime(Protocol):
    """A loaded causal language model with its cache. Only the generating thread calls it."""

    vocab_size: int
    max_length: int
    """Most tokens of a text, prompt and answer together."""
    slots: int
    """Most texts at once."""
    blocks: int
    """Blocks of the cache, at least as many as a text of `max_length` tokens needs."""
    shares_prefixes: bool
    """Whether the keys and values of equal beginnings of texts are equal, whatever follows."""
    eos_ids: frozenset[int]
    longest_step_s: float
    """Measured time of the largest piece of a prompt that one step computes, seconds; 0 where it was not measured."""
    copy_states: CopyStates | None
    """copy_states(sources, targets) lets each of the slots `targets` have the state of the slot of `sources` in its
    place. None: a text is all in its blocks."""
    feed: Callable[[torch.Tensor], None] | None
    """feed(tokens) says what was chosen for the `logit_rows` of the last step: INT64 [n], on the device. The
    next step may then be given before these tokens are known here. None: each step waits for the last one's."""

    def ready(self) -> bool:
        """Whether `forward` computes at once; False while a part of the model is being started again.

        Raises EngineError, once, where the content of the cache is lost.
        """
        ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's keys and values into the cache; FLOAT32 [logit rows + n, vocab_size] logits.

        Those of the n tokens at `further` come last. They are on the CPU or on the model's device.
        The result is valid until the next call.
        """
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each of the blocks `targets` hold what the block of `sources` in its place holds; none is in both."""
        ...

    def close(self) -> None:
        """End whatever belongs to the model beside this process. Any thread calls this, last of all."""
        ...


class BlockBorrower(Protocol):
    """Another user of the blocks that no text holds, in runs. Only the generating thread calls it."""

    def begin_iteration(self) -> None:
        """An iteration begins: nothing computes, and admission follows."""
        ...

    @property
    def reclaimable(self) -> int:
        """Blocks that `reclaim` can free now."""
        ...

    def reclaim(self, blocks: int) -> None:
        """Give blocks back until so many are free in the pool, as far as possible: texts need them."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when its records of the blocks contradict one another."""
        ...


@dataclass(frozen=True)
class Groups:
    """The tokens of a batch by group.

    tokens  number of tokens in the batch
    firsts  INT32 [groups + 1]: group g has the tokens order[firsts[g]:firsts[g + 1]]
    order   INT32 [tokens in a group], no token twice
    """

    tokens: int
    firsts: torch.Tensor
    order: torch.Tensor

    def each(self) -> list[torch.Tensor]:
        """The tokens of each group, INT64 [n]."""
        ends = self.firsts.tolist()
        return [self.order[start:end].long() for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class LowRank:
    """Low-rank terms as plain arrays: a token's outputs grow by its inputs times the A and the B of its group.

    memory  flat, of the linears' dtype; holds the factors
    places  INT64 [groups, layers, LINEARS, 3, 4]: for up to three parts of a linear's outputs the offset in memory,
            the rank, the first output and the number of outputs; rank 0: no term. At the offset is A,
            [rank, inputs], and directly behind it B, [rank, outputs], scaled
    all     the tokens of the batch
    last    those whose logits are wanted, numbered among themselves
    """

    memory: torch.Tensor
    places: torch.Tensor
    all: Groups
    last: Groups

    def arrays(self) -> list[torch.Tensor]:
        """What `kernels/added.h` takes, in its order."""
        return [self.memory, self.places, self.all.firsts, self.all.order, self.last.firsts, self.last.order]


class LinearDelta(Protocol):
    """The terms that one step adds to the outputs of its linears."""

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add the terms of `inputs` [tokens, inputs] to `outputs` [tokens, width], in place."""
        ...

    def subset(self, tokens: torch.Tensor) -> LinearDelta | None:
        """The same for these tokens alone, INT64 [n] places in the batch; None where none of them has an adapter."""
        ...

    def low_rank(self, last: torch.Tensor) -> LowRank | None:
        """The same as plain arrays, with the tokens at `last`, INT64 [n]; None where only `add` computes them."""
        ...


class FixedTerms(Protocol):
    """The terms of steps of one shape, computed from what lies at fixed addresses: a CUDA graph can hold them."""

    @property
    def delta(self) -> LinearDelta:
        """Adds the terms of the step that `fill` was given last, without a wait for the device."""
        ...

    def fill(self, batch: StepBatch) -> None:
        """Bring the adapters of `batch` to the device. The step before the last one has ended."""
        ...


class LinearHook(Protocol):
    """Called once in each step in which a row has an adapter, and in no other."""

    def linear_delta(self, batch: StepBatch) -> LinearDelta:
        """The terms of `batch`, whose `adapters` are set. Valid until the next call."""
        ...


@runtime_checkable
class GraphHook(LinearHook, Protocol):
    """A hook whose terms CUDA graphs can hold."""

    def linears(self, batch: StepBatch) -> int:
        """The linears to which the adapters of `batch` add terms, bit by bit; 0: a graph cannot compute them.

        Called once for each step, before the `FixedTerms` of the step are filled.
        """
        ...

    def fixed_terms(self, rows: int, chunk: int, linears: int) -> FixedTerms:
        """Those of steps of so many rows of a token and a chunk of so many tokens behind them, 0 for none, of these
        linears."""
        ...
