"""Builds the engines of a text model in a temporary folder and publishes them, all or nothing."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift import files
from shapeshift.build_engines.text import edges
from shapeshift.build_engines.text.config import length_histogram, read_json
from shapeshift.build_engines.text.edges import KEEP_BELOW, Curves, TooSlowError
from shapeshift.build_engines.text.engines import BuildResult, TextEngineBuilder, dynamic_lengths
from shapeshift.build_engines.text.plan import Plan, engine_outputs
from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import best_curve, row_slots
from shapeshift.engines.gpu import with_cpu
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest, Output
from shapeshift.engines.policy.packs import expected_ms
from shapeshift.engines.providers import lookup
from shapeshift.engines.providers.emulated import FILE_NAME, PROVIDER
from shapeshift.engines.text import tokenizer_files
from shapeshift.engines.text.families import family_of, hidden_size, stated_dimensions, vocabulary_size
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.verify import MIN_COSINE, VerificationError
from shapeshift.errors import InvalidInputError
from shapeshift.kernels.kernel_build import no_collections
from shapeshift.progress import ProgressCallback


def build(planned: Plan, target: Path, progress: ProgressCallback) -> Manifest:
    """Build the engines of `planned` and move them to `target`. After an error `target` is unchanged."""
    with files.replace_folder(target) as work:
        result = _fastest(planned, work, progress)
        result.save(work)
    return result


def _fastest(planned: Plan, work: Path, progress: ProgressCallback) -> Manifest:
    """The engines of the plan's provider in `work`, or those of its rival where their profile is faster.

    The rival is built first: where engines of the plan's provider are slower whatever their lengths, few are built.
    """
    if planned.rival is None:
        return _made(planned, work, progress)
    provider, rival = planned.provider.name, planned.rival.name
    beside = work.with_name(f"{work.name}.{rival}")
    try:
        try:
            other = _made(replace(planned, provider=planned.rival), beside, progress)
        except Exception as error:  # noqa: BLE001  whatever it is, the plan's own provider serves
            chosen, note = _made(planned, work, progress), f"provider auto: {provider}, because {rival} failed: {error}"
        else:
            chosen, note = _compared(planned, work, progress, other)
            if chosen is other:
                shutil.rmtree(work)
                beside.rename(work)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return replace(chosen, build_key=planned.key(), note="; ".join(filter(None, (chosen.note, note))))


def _compared(planned: Plan, work: Path, progress: ProgressCallback, other: Manifest) -> tuple[Manifest, str]:
    """As `faster`, of engines that are built in `work` unless they are known to be slower than `other`."""
    weights = length_histogram(planned.front)
    try:
        return faster(_made(planned, work, progress, most_ms(other, weights)), other, weights)
    except TooSlowError as error:
        return other, _comparison(other, weights, planned.provider.name, f"at least {error.ms:.3g}")


def faster(first: Manifest, other: Manifest, weights: Sequence[float]) -> tuple[Manifest, str]:
    """`first` if its expected time of a text is at most `most_ms(other)`, else `other`; and a line about it.

    weights: of texts of 1, 2, ... tokens.
    """
    is_first = _text_ms(first, weights) <= most_ms(other, weights)
    chosen, left = (first, other) if is_first else (other, first)
    return chosen, _comparison(chosen, weights, left.provider, f"{_text_ms(left, weights):.3g}")


def most_ms(other: Manifest, weights: Sequence[float]) -> float:
    """The expected time of a text at which engines are worth more than `other`.

    They must be clearly faster than one engine for any length: each holds a copy of the weights.
    """
    return _text_ms(other, weights) * (KEEP_BELOW if other.provider in lookup.OF_ANY_LENGTH else 1.0)


def _text_ms(engines: Manifest, weights: Sequence[float]) -> float:
    return expected_ms(best_curve(engines).tolist(), weights)


def _comparison(chosen: Manifest, weights: Sequence[float], left: str, left_ms: str) -> str:
    ms = _text_ms(chosen, weights)
    copies = " with a copy of the weights for each length" if chosen.provider in lookup.OF_ANY_LENGTH else ""
    return f"provider auto: {chosen.provider}, {ms:.3g} ms a text by the profile; {left} takes {left_ms} ms{copies}"


def _made(planned: Plan, work: Path, progress: ProgressCallback, at_most_ms: float = math.inf) -> Manifest:
    built, precision, note = _built(planned, work, progress, at_most_ms)
    return _manifest(planned, work, built, precision, note)


def _built(planned: Plan, work: Path, progress: ProgressCallback, at_most_ms: float) -> tuple[BuildResult, str, str]:
    """The engines, their precision, and a note if it is not the plan's.

    The engines of a model share their weights: if one fails the verification, all are built in f32.
    """
    if planned.provider.name == "emulated":
        _prepare(planned, work)
        return _build_emulated(planned, work), planned.precision, ""
    with no_collections():
        # All that takes seconds to import; the tokenizer needs a part of it.
        importlib.import_module("transformers.modeling_utils")
    library = _prepare(planned, work)
    try:
        return TextEngineBuilder(planned, work, progress, library).build(at_most_ms), planned.precision, ""
    except VerificationError as error:
        if planned.precision == "f32":
            raise
        progress("build again in f32")
        _prepare(planned, work)
        in_f32 = replace(planned, precision="f32")
        built = TextEngineBuilder(in_f32, work, progress, library).build(at_most_ms)
        return built, in_f32.precision, f"{error}; built in f32"


def _build_emulated(planned: Plan, work: Path) -> BuildResult:
    """Write the description of the emulated engines into `work`."""
    # See `shapeshift.engines.providers.emulated`.
    front, settings = planned.front, planned.front.settings
    if not settings.profile_file:
        raise InvalidInputError("profile_file", "", "an emulated model needs a measured profile")
    spec = read_json(front.folder / settings.profile_file, "profile_file")
    try:
        lengths, medians = list(map(int, spec["lengths"])), list(map(float, spec["latency_ms"]))
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError("profile_file", settings.profile_file, "lengths and latency_ms") from None
    outputs = engine_outputs(planned, hidden_size(planned.checkpoint.config))
    widths = {name: dims[-1] for name, dims in outputs.items()}
    PROVIDER.describe(work, lengths, medians, widths)

    def points(at: Sequence[int]) -> tuple[Latency, ...]:
        values = np.interp(at, lengths, medians)
        return tuple(Latency(n, 1, float(ms), float(ms), float(ms)) for n, ms in zip(at, values, strict=True))

    def entry(tokens: int | None, at: Sequence[int]) -> EngineEntry:
        slots = None if tokens is None else row_slots(tokens, settings.packing, settings.max_tokens)
        return EngineEntry(FILE_NAME, tokens, slots, 0.0, 1.0, points(at))

    def curves(at: Sequence[int]) -> Curves:
        values = [point.best_ms for point in points(at)]
        return Curves(list(at), values, None)

    entries = [entry(tokens, [tokens]) for tokens in edges.choose_edges(front, curves)]
    if settings.dynamic:
        entries.insert(0, entry(None, dynamic_lengths(settings.max_tokens)))
    vocabulary = vocabulary_size(planned.checkpoint.config)
    return BuildResult(tuple(entries), outputs, vocabulary, settings.packing, 0)


def _prepare(planned: Plan, work: Path) -> Any:
    """Empty the folder `work` and write the tokenizer into it. Returns that of transformers."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = planned.checkpoint
    pad_to = planned.front.settings.max_tokens if family_of(checkpoint.config).pads else 0
    library = tokenizer_files.write(checkpoint.folder, work, planned.modules.lower_case, pad_to)
    if not checkpoint.tokenizer_file.is_file():
        # Tokens that stand beside a tokenizer.json may have ids that the model lacks: texts with one are refused.
        tokenizer_files.require_ids_below(work / TOKENIZER_FILE, vocabulary_size(checkpoint.config))
    return library


def _manifest(planned: Plan, work: Path, built: BuildResult, precision: str, note: str) -> Manifest:
    return Manifest(
        model=planned.front.name,
        checkpoint_sha256=planned.source_sha256,
        build_key=planned.key(),
        provider=planned.provider.name,
        provider_version=planned.provider.version(),
        precision=precision,
        vocabulary=built.vocabulary,
        max_tokens=planned.front.settings.max_tokens,
        packs_rows=built.packs_rows,
        position_offset=built.position_offset,
        reference="transformers, f32, one text at a time",
        tolerance=f"cosine with the reference at least {MIN_COSINE[precision]} for every text",
        hardware=with_cpu(planned.device),
        outputs=tuple(Output(name, "TYPE_FP32", dims) for name, dims in built.outputs.items()),
        files=manifest.list_files(work),
        engines=built.entries,
        labels=planned.labels,
        activation=planned.activation,
        cross_encoder=planned.cross_encoder,
        prompts=planned.modules.prompts,
        default_prompt=planned.modules.default_prompt,
        pair_templates=built.pair_templates,
        dimensions=stated_dimensions(planned.checkpoint.config),
        type_stride=built.type_stride,
        note=note,
        checkpoint_origin=planned.checkpoint.origin,
        device_mb=built.device_mb,
    )
