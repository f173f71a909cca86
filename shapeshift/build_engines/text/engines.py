"""Builds the engines of a text model from its checkpoint: export, compile, verify, profile."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift.build_engines.text import edges
from shapeshift.build_engines.text.edges import Curves
from shapeshift.build_engines.text.plan import Plan, engine_outputs
from shapeshift.engines.execution.engine_set import MOST_TOKENS, pack, row_slots, unpack
from shapeshift.engines.interfaces import Array, Engine, Ids, Runtime
from shapeshift.engines.manifest import EngineEntry
from shapeshift.engines.profile import measure_interleaved
from shapeshift.engines.providers import lookup
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.text.tokenizer import PairTemplate, TextTokenizer
from shapeshift.engines.verify import LONGEST_KEPT, REFERENCE, Deviation, ReferenceTexts
from shapeshift.errors import InvalidInputError
from shapeshift.progress import ProgressCallback

_PROFILE_BUDGET_S = 14.0
_PROBE_BUDGET_S = 4.0
# Of the time of a token in packs half as long.
_PAYS_BELOW = 0.9
_DYNAMIC_LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


@dataclass(frozen=True)
class BuildResult:
    """The result of a build, besides the files in its folder."""

    entries: tuple[EngineEntry, ...]
    outputs: dict[str, tuple[int, ...]]
    vocabulary: int
    packs_rows: bool
    position_offset: int
    type_stride: int = 0
    pair_templates: Mapping[str, PairTemplate] = field(default_factory=dict)
    device_mb: float = 0.0


@dataclass(frozen=True)
class _VerifiedEngine:
    file: str
    engine: Engine
    deviation: Deviation


def dynamic_lengths(max_tokens: int) -> list[int]:
    """The lengths at which the dynamic engine is profiled."""
    return [*(length for length in _DYNAMIC_LENGTHS if length < max_tokens), max_tokens]


class TextEngineBuilder:
    """Builds the engines of one plan in the folder `work`, which must hold the tokenizer.

    library: the tokenizer of transformers.
    """

    def __init__(self, planned: Plan, work: Path, progress: ProgressCallback, library: Any) -> None:
        # torch takes seconds to import; a build with nothing to do must not import it.
        from shapeshift.engines.text import pair_templates
        from shapeshift.engines.text.reference_model import ReferenceModel

        settings = planned.front.settings
        progress("read the reference model")
        self._plan = planned
        self._work = work
        self._progress = progress
        self._max_tokens = settings.max_tokens
        answers: tuple[int, ...] = ()
        self._templates: dict[str, PairTemplate] = {}
        if planned.answers_pairs:
            answers = planned.modules.answers or pair_templates.yes_and_no(library)
            source = library, planned.checkpoint.folder, planned.modules.prompts, planned.pair_template
            self._templates = pair_templates.read(*source)
        options = (planned.engine_outputs, settings.layers, planned.head, planned.pairs, library, answers)
        reference = ReferenceModel(planned.checkpoint, planned.modules, *options)
        if settings.max_tokens > reference.max_tokens:
            limit = f"at most {reference.max_tokens} for this checkpoint"
            raise InvalidInputError("max_tokens", settings.max_tokens, limit)
        self._outputs = engine_outputs(planned, reference.hidden)
        self._reference = reference
        # Native computes each text alone, so that no mask has to keep texts apart.
        is_native = planned.provider.name in lookup.OF_ANY_LENGTH and "TERM_WEIGHTS" not in planned.engine_outputs
        self._packs = settings.packing and (is_native or reference.packs_rows)
        tokenizer = TextTokenizer(work / TOKENIZER_FILE, settings.max_tokens, type_stride=reference.type_stride)
        if planned.answers_pairs:
            pair_templates.require_texts(tokenizer, self._templates, *source)
        else:
            reference.require_texts(tokenizer)
        ends = tokenizer.encode(b"a", 0, False)
        # Positions count from the id of padding, if not from 0: one of it inside a text is not counted.
        uncounted = reference.position_offset - 1 if reference.position_offset else None
        self._texts = ReferenceTexts(
            reference.compute, int(ends[0]), int(ends[-1]), reference.vocabulary, reference.padding, uncounted
        )
        self._runtime: Runtime | None = None

    def build(self, at_most_ms: float = math.inf) -> BuildResult:
        """Export, compile, verify and profile. at_most_ms: see `edges.choose_edges`.

        Raises VerificationError naming the first engine that fails, and TooSlowError.
        """
        plan, settings = self._plan, self._plan.front.settings
        self._progress(f"export to {plan.provider.name}")
        rows = [self._texts.row(length)[0] for length in ((7, 9) if self._packs else (16,))]
        example = pack(rows, 24, len(rows), self._reference.position_offset)
        with warnings.catch_warnings():
            # Tracing warns about every shape that it fixes; the verification below runs other shapes.
            warnings.simplefilter("ignore")
            plan.provider.export(self._reference.module(), example, self._work, plan.precision)
        if plan.provider.name in lookup.OF_ANY_LENGTH:
            static = settings.explicit_edges() or ([] if settings.dynamic else [self._max_tokens])
        else:
            static = edges.choose_edges(plan.front, self._probe, at_most_ms)
        if plan.device is not None and self._packs:
            static += self.pack_lengths()
        shapes: list[int | None] = [None, *static] if settings.dynamic else [*static]
        entries = self._profile(
            [self._verified(tokens, f"{done} of {len(shapes)}") for done, tokens in enumerate(shapes)]
        )
        if self._max_tokens >= LONGEST_KEPT:
            (self._work / REFERENCE).write_text(self._texts.kept(plan.precision))
        dynamic = next((entry for entry in entries if entry.tokens is None), None)
        faster = edges.keep_faster(plan.front, [entry for entry in entries if entry.tokens], dynamic)
        return BuildResult(
            tuple(([dynamic] if dynamic else []) + faster),
            self._outputs,
            self._reference.vocabulary,
            self._packs,
            self._reference.position_offset,
            self._reference.type_stride,
            self._templates,
            0.0 if plan.device is None or self._runtime is None else round(self._runtime.used_mb(), 1),
        )

    def pack_lengths(self) -> list[int]:
        """The tokens of engines for packs that are longer than any text: doubled as long as a token gets cheaper.

        On a GPU one text leaves most of it idle.
        """
        lengths, length, best = list[int](), self._max_tokens, math.inf
        while length <= MOST_TOKENS:
            self._progress(f"time an engine of {length} tokens")
            [point] = measure_interleaved([self._timed(self._make(length)[1], length)], _PROBE_BUDGET_S)
            if point.best_ms / length > _PAYS_BELOW * best:
                break
            lengths, length, best = [*lengths, length], 2 * length, point.best_ms / length
        return [length for length in lengths if length > self._max_tokens]

    def _make(self, tokens: int | None) -> tuple[str, Engine]:
        provider, precision = self._plan.provider, self._plan.precision
        slots = None if tokens is None else row_slots(tokens, self._packs, self._max_tokens)
        file = provider.compile(self._work, precision, tokens, slots, self._plan.front.settings.max_tokens)
        if self._runtime is None:
            self._runtime = provider.open(self._work, precision, 1, self._plan.device)
        return file, self._runtime.engine(tokens, slots)

    def _run(self, engine: Engine, rows: Sequence[Ids]) -> dict[str, Array]:
        total = sum(map(len, rows))
        counted_from = self._reference.position_offset, self._reference.type_stride
        inputs = pack(rows, engine.tokens or total, engine.rows or len(rows), *counted_from)
        return unpack(engine.run(inputs), rows)

    def _probe(self, lengths: Sequence[int]) -> Curves:
        self._progress(f"time engines at {', '.join(map(str, lengths))} tokens")
        calls = [self._timed(self._make(length)[1], length) for length in lengths]
        if self._plan.front.settings.dynamic:
            engine = self._make(None)[1]
            calls += [self._timed(engine, length) for length in lengths]
        best = [point.best_ms for point in measure_interleaved(calls, _PROBE_BUDGET_S)]
        count = len(lengths)
        return Curves(list(lengths), best[:count], best[count:] or None)

    def _timed(self, engine: Engine, length: int) -> tuple[int, Callable[[], object]]:
        return length, partial(self._run, engine, [self._texts.row(row)[0] for row in self._rows_of(length)])

    def _rows_of(self, tokens: int) -> list[int]:
        """The lengths of the texts of a full pack: the longest that there are."""
        count, rest = divmod(tokens, self._max_tokens)
        return [self._max_tokens] * count + [rest] * bool(rest)

    def _verified(self, tokens: int | None, count: str) -> _VerifiedEngine:
        name = "the dynamic engine" if tokens is None else f"{tokens} tokens"
        self._progress(f"compile and verify: {name}, {count} done")
        file, engine = self._make(tokens)
        deviation = self._texts.deviation(partial(self._run, engine), self._packs_to_verify(tokens))
        plan = self._plan
        deviation.require_within(plan.precision, f"{name} ({plan.provider.name}, {plan.precision})")
        return _VerifiedEngine(file, engine, deviation)

    def _packs_to_verify(self, tokens: int | None) -> list[list[int]]:
        longest = tokens or self._max_tokens
        packs = [self._rows_of(longest), self._rows_of(longest // 2 + 1)]
        if tokens is None:
            packs += [[length] for length in (2, 17, 100) if length < longest]
        if self._packs and longest >= 16:
            packs.append([min(length, self._max_tokens) for length in (longest // 4, longest // 4 + 1, longest // 3)])
        return packs

    def _profile(self, candidates: Sequence[_VerifiedEngine]) -> list[EngineEntry]:
        self._progress("profile")
        is_alone = self._plan.provider.name in lookup.OF_ANY_LENGTH
        of_any = dynamic_lengths(self._max_tokens)
        if is_alone:
            # It has no rival whose times lie between, and the executor corrects its predictions by what calls take.
            of_any = [length for length in of_any if length.bit_count() == 1 or length == self._max_tokens]
        lengths = [[item.engine.tokens] if item.engine.tokens else of_any for item in candidates]
        calls = [
            self._timed(item.engine, length)
            for item, its_lengths in zip(candidates, lengths, strict=True)
            for length in its_lengths
        ]
        points = iter(measure_interleaved(calls, 0.0 if is_alone else _PROFILE_BUDGET_S))
        return [
            EngineEntry(
                item.file,
                item.engine.tokens,
                item.engine.rows,
                item.deviation.max_error,
                item.deviation.min_cosine,
                tuple(next(points) for _ in its_lengths),
            )
            for item, its_lengths in zip(candidates, lengths, strict=True)
        ]
