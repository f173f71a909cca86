"""From a checkpoint to a folder of verified, profiled engines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from build_engines import edges
from build_engines.edges import Curves
from build_engines.plan import Plan, check_outputs, output_dims
from shapeshift.engines.ladder import rows_of
from shapeshift.engines.manifest import EngineEntry
from shapeshift.engines.packing import pack, unpack
from shapeshift.engines.profile import interleaved
from shapeshift.engines.protocol import Array, Engine, Ids, Runtime
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.tokenizer import TextTokenizer
from shapeshift.engines.verify import Deviation, TestTexts
from shapeshift.errors import InvalidInputError

_PROFILE_BUDGET_S = 14.0
_PROBE_BUDGET_S = 4.0
_DYNAMIC_LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """What a build of engines yields, besides the files in its folder."""

    entries: tuple[EngineEntry, ...]
    outputs: dict[str, tuple[int, ...]]
    vocabulary: int
    packs_rows: bool
    position_offset: int
    type_stride: int = 0


@dataclass(frozen=True)
class _Candidate:
    file: str
    engine: Engine
    deviation: Deviation


def dynamic_lengths(max_tokens: int) -> list[int]:
    """The lengths at which the engine for any shape is profiled."""
    return [*(length for length in _DYNAMIC_LENGTHS if length < max_tokens), max_tokens]


class TextEngines:
    """Builds the engines of one plan in the folder `work`, which already holds the tokenizer."""

    def __init__(self, planned: Plan, work: Path, progress: Progress) -> None:
        # torch takes seconds to import, which a build with nothing to do must not wait for.
        from shapeshift.engines.text_model import ReferenceModel

        settings = planned.front.settings
        progress("read the reference model")
        self._plan = planned
        self._work = work
        self._progress = progress
        self._max_tokens = settings.max_tokens
        asked = (planned.engine_outputs, settings.layers, planned.head, planned.pairs)
        reference = ReferenceModel(planned.checkpoint, settings.pooling, settings.normalize, *asked)
        if settings.max_tokens > reference.max_tokens:
            limit = f"at most {reference.max_tokens} for this checkpoint"
            raise InvalidInputError("max_tokens", settings.max_tokens, limit)
        self._outputs = check_outputs(planned, output_dims(planned, reference.hidden))
        self._reference = reference
        self._packs = settings.packing and reference.packs_rows
        ends = TextTokenizer(work / TOKENIZER_FILE, settings.max_tokens).encode(b"a", 0, False)
        self._texts = TestTexts(reference.compute, int(ends[0]), int(ends[-1]), reference.vocabulary)
        self._runtime: Runtime | None = None

    def build(self) -> Built:
        """Export, compile, verify and profile; OffReferenceError names the first engine off the reference."""
        plan, settings = self._plan, self._plan.front.settings
        self._progress(f"export to {plan.provider.name}")
        rows = [self._texts.row(length)[0] for length in ((7, 9) if self._packs else (16,))]
        example = pack(rows, 24, len(rows), self._reference.position_offset)
        with warnings.catch_warnings():
            # Tracing warns of every shape it fixes; that the graph serves other shapes is verified below.
            warnings.simplefilter("ignore")
            plan.provider.export(self._reference.module(self._packs), example, self._work, plan.precision)
        static = edges.choose(plan.front, self._probe)
        shapes: list[int | None] = [None, *static] if settings.dynamic else [*static]
        entries = self._profile([self._verified(tokens) for tokens in shapes])
        dynamic = next((entry for entry in entries if entry.tokens is None), None)
        kept = edges.worth_keeping(plan.front, [entry for entry in entries if entry.tokens], dynamic)
        return Built(
            tuple(([dynamic] if dynamic else []) + kept),
            self._outputs,
            self._reference.vocabulary,
            self._packs,
            self._reference.position_offset,
            self._reference.type_stride,
        )

    def _make(self, tokens: int | None) -> tuple[str, Engine]:
        provider, precision = self._plan.provider, self._plan.precision
        slots = None if tokens is None else rows_of(tokens, self._packs)
        file = provider.compile(self._work, precision, tokens, slots)
        if self._runtime is None:
            self._runtime = provider.open(self._work, precision, threads=1)
        return file, self._runtime.engine(tokens, slots)

    def _run(self, engine: Engine, rows: Sequence[Ids]) -> dict[str, Array]:
        total = sum(map(len, rows))
        offset = self._reference.position_offset
        inputs = pack(rows, engine.tokens or total, engine.rows or len(rows), offset)
        return unpack(engine.run(inputs), rows)

    def _probe(self, lengths: Sequence[int]) -> Curves:
        self._progress(f"time engines at {', '.join(map(str, lengths))} tokens")
        calls = [self._timed(self._make(length)[1], length) for length in lengths]
        if self._plan.front.settings.dynamic:
            engine = self._make(None)[1]
            calls += [self._timed(engine, length) for length in lengths]
        best = [point.best_ms for point in interleaved(calls, _PROBE_BUDGET_S)]
        count = len(lengths)
        return Curves(list(lengths), best[:count], best[count:] or None)

    def _timed(self, engine: Engine, length: int) -> tuple[int, Callable[[], object]]:
        return length, partial(self._run, engine, [self._texts.row(length)[0]])

    def _verified(self, tokens: int | None) -> _Candidate:
        name = "the dynamic engine" if tokens is None else f"{tokens} tokens"
        self._progress(f"compile and verify {name}")
        file, engine = self._make(tokens)
        deviation = self._texts.deviation(partial(self._run, engine), self._packs_to_verify(tokens))
        plan = self._plan
        deviation.require_within(plan.precision, f"{name} ({plan.provider.name}, {plan.precision})")
        return _Candidate(file, engine, deviation)

    def _packs_to_verify(self, tokens: int | None) -> list[list[int]]:
        longest = tokens or self._max_tokens
        packs = [[longest], [longest // 2 + 1]]
        if tokens is None:
            packs += [[length] for length in (2, 17, 100) if length < longest]
        if self._packs and longest >= 16:
            packs.append([longest // 4, longest // 4 + 1, longest // 3])
        return packs

    def _profile(self, candidates: Sequence[_Candidate]) -> list[EngineEntry]:
        self._progress("profile")
        lengths = [
            [item.engine.tokens] if item.engine.tokens else dynamic_lengths(self._max_tokens) for item in candidates
        ]
        calls = [
            self._timed(item.engine, length) for item, own in zip(candidates, lengths, strict=True) for length in own
        ]
        points = iter(interleaved(calls, _PROFILE_BUDGET_S))
        return [
            EngineEntry(
                item.file,
                item.engine.tokens,
                item.engine.rows,
                item.deviation.max_error,
                item.deviation.min_cosine,
                tuple(next(points) for _ in own),
            )
            for item, own in zip(candidates, lengths, strict=True)
        ]
