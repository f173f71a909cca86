"""Variants of a built front: other subsets of its engines, the baselines DT and ST, another chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bench.common.output import BUILD, FOLDER
from shapeshift.build_engines.text.front import latency_profile
from shapeshift.build_engines.text.workers import write_workers
from shapeshift.engines import manifest
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.engines.providers import lookup
from shapeshift.triton import model_config

ENGINES = BUILD / "engines" / "encode"


def publish_variant(
    name: str,
    entries: Sequence[EngineEntry],
    repository: Path,
    packs_rows: bool = False,
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a front model `name` to `repository` that serves `entries` over the files of `encode`: the same weights and
    provider.

    packs_rows: whether texts may share an engine call; the baselines never do. parameters: values that replace those
    of the generated config.pbtxt; without one the wait has no bound: a slow baseline is a result. Where they state a
    placement with workers, the folders of these are written as well.
    """
    built = manifest.load(ENGINES)
    folder = FOLDER / "engines" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ENGINES, folder, copy_function=lambda source, target: Path(target).hardlink_to(source))
    (folder / manifest.FILE_NAME).unlink()
    if not (kernels := FOLDER / "kernels").exists():
        kernels.symlink_to((BUILD / "kernels").resolve())
    packs_rows = built.packs_rows and packs_rows
    variant = replace(built, packs_rows=packs_rows, engines=tuple(entries))
    variant.save(folder)
    config = model_config.read(BUILD / "repository" / ENGINES.name / "config.pbtxt")
    config.name = name
    model_config.set_parameter(config, "engines", str(folder.resolve()))
    changed = {
        "manifest_sha256": manifest.sha256(folder),
        "profile": json.dumps(latency_profile(variant)),
        "max_queue_ms": "0",
        # On several GPUs that of `encode` may have workers.
        "placement": "inline",
        **parameters,
    }
    for field, value in changed.items():
        model_config.set_parameter(config, field, value)
    (repository / name / "1").mkdir(parents=True)
    model_config.write(config, repository / name / "config.pbtxt")
    write_workers(config, variant, repository, ())


def publish_with_template(model: str, name: str, template: str, repository: Path) -> None:
    """Write a front model `name` to `repository`: the generator `model`, which is built, with another chat template."""
    built, folder = BUILD.resolve() / "repository" / model, repository / name
    shutil.copytree(built / "1", folder / "1")
    (folder / "1" / "chat_template.jinja").write_text(template)
    config = model_config.read(built / "config.pbtxt")
    config.name = name
    for path in ("checkpoint", "kernel_cache"):
        model_config.set_parameter(config, path, str((built / config.parameters[path].string_value).resolve()))
    model_config.write(config, folder / "config.pbtxt")


def baselines(built: Manifest) -> dict[str, list[EngineEntry]]:
    """The entries of DT and ST, by their names in lower case. Engines that compute no padding make no ST."""
    if built.provider in lookup.OF_ANY_LENGTH:
        return {"dt": dynamic_only(built)}
    return {"dt": dynamic_only(built), "st": padded(built)}


def dynamic_only(built: Manifest) -> list[EngineEntry]:
    """DT: one engine for any shape."""
    return [entry for entry in built.engines if entry.tokens is None]


def padded(built: Manifest) -> list[EngineEntry]:
    """ST: one static engine of the longest length, to which every text is padded."""
    dynamic = dynamic_only(built)[0]
    longest = max(dynamic.latency, key=lambda point: point.tokens)
    return [
        replace(
            dynamic,
            tokens=built.max_tokens,
            rows=1,
            latency=(Latency(built.max_tokens, 1, longest.median_ms, longest.p99_ms, longest.best_ms),),
        )
    ]
