"""A build from an empty folder to the place that servers read, all or nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from build_engines.compile import Built, Progress, TextEngines
from build_engines.emulate import build as emulate
from build_engines.plan import Plan
from shapeshift.engines import manifest
from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.manifest import Manifest, Output
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.verify import MIN_COSINE, OffReferenceError


def build(planned: Plan, target: Path, progress: Progress) -> Manifest:
    """Build the engines of `planned` and put them at `target`; on any error `target` stays as it was."""
    work = target.with_name(f".{target.name}.building")
    try:
        built, precision, note = _built(planned, work, progress)
        made = _manifest(planned, work, built, precision, note)
        made.save(work)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _built(planned: Plan, work: Path, progress: Progress) -> tuple[Built, str, str]:
    """The engines, their precision, and why it is not the plan's where it is not.

    All engines of a model share their weights, so that all are in f32 where one is off the reference in bf16.
    """
    _start(planned, work)
    if planned.provider.name == "emulated":
        return emulate(planned, work), planned.precision, ""
    try:
        return TextEngines(planned, work, progress).build(), planned.precision, ""
    except OffReferenceError as error:
        if planned.precision == "f32":
            raise
        progress("build again in f32")
        _start(planned, work)
        return TextEngines(replace(planned, precision="f32"), work, progress).build(), "f32", f"{error}; built in f32"


def _start(planned: Plan, work: Path) -> None:
    """Make `work` anew, with the tokenizer."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copyfile(planned.checkpoint.tokenizer_file, work / TOKENIZER_FILE)


def _manifest(planned: Plan, work: Path, built: Built, precision: str, note: str) -> Manifest:
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
        hardware=cpu_model(),
        outputs=tuple(Output(name, "TYPE_FP32", dims) for name, dims in built.outputs.items()),
        files=manifest.list_files(work),
        engines=built.entries,
        labels=planned.labels if "LOGITS" in built.outputs else (),
        type_stride=built.type_stride,
        note=note,
    )
