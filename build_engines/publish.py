"""A build from an empty folder to the place that servers read, all or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from build_engines.compile import Built, Progress, TextEngines
from build_engines.emulate import build as emulate
from build_engines.plan import Plan
from shapeshift.engines import manifest
from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.manifest import Manifest, Output
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.verify import MIN_COSINE


def build(planned: Plan, target: Path, progress: Progress) -> Manifest:
    """Build the engines of `planned` and put them at `target`; on any error `target` stays as it was."""
    work = target.with_name(f".{target.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        shutil.copyfile(planned.checkpoint.tokenizer_file, work / TOKENIZER_FILE)
        emulated = planned.provider.name == "emulated"
        built = emulate(planned, work) if emulated else TextEngines(planned, work, progress).build()
        made = _manifest(planned, work, built)
        made.save(work)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _manifest(planned: Plan, work: Path, built: Built) -> Manifest:
    return Manifest(
        model=planned.front.name,
        checkpoint_sha256=planned.source_sha256,
        build_key=planned.key(),
        provider=planned.provider.name,
        provider_version=planned.provider.version(),
        precision=planned.precision,
        vocabulary=built.vocabulary,
        max_tokens=planned.front.settings.max_tokens,
        packs_rows=built.packs_rows,
        position_offset=built.position_offset,
        reference="transformers, f32, one text at a time",
        tolerance=f"cosine with the reference at least {MIN_COSINE[planned.precision]} for every text",
        hardware=cpu_model(),
        outputs=tuple(Output(name, "TYPE_FP32", dims) for name, dims in built.outputs.items()),
        files=manifest.list_files(work),
        engines=built.entries,
        labels=planned.labels if "LOGITS" in built.outputs else (),
        type_stride=built.type_stride,
    )
