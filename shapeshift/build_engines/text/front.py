"""Fronts of the backend polymorph: their engines, and the folders of the front and of its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeshift import settings
from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.build_engines import adapters
from shapeshift.build_engines.hub.sources import base_names
from shapeshift.build_engines.model_folder import BUILT, UP_TO_DATE, write_front
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.text.build import build
from shapeshift.build_engines.text.config import TextFrontConfig, length_histogram
from shapeshift.build_engines.text.plan import Plan, engine_outputs, is_current, plan, with_dims
from shapeshift.build_engines.text.workers import choose_placement, placement_parameters, write_workers
from shapeshift.engines import device_plan, manifest, weight_headers
from shapeshift.engines.manifest import GeneratedSettings, Manifest
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.engines.text import tokenizer_files
from shapeshift.engines.text.families import FAMILIES, family_of, hidden_size, longest_text, vocabulary_size
from shapeshift.engines.verify import REFERENCE
from shapeshift.errors import UnsupportedError
from shapeshift.polymorph.policy.placement import Placement
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings, front_signature
from shapeshift.progress import ProgressCallback
from shapeshift.settings import require
from shapeshift.triton import model_config

if TYPE_CHECKING:
    from shapeshift.adapter_cache.registry.peft import BaseModel

BACKEND = "polymorph"


def read(folder: Path, config: Any, values: Mapping[str, str]) -> TextFrontConfig:
    """The front in `folder`. Raises InvalidInputError naming the field."""
    names, of_adapters = settings.names(TextEngineSettings, PolymorphSettings), settings.names(AdapterSettings)
    has_adapters = "adapter_mb" in values
    unfit = {"goes with adapter_mb only, with which a text model takes adapters": of_adapters}
    settings.refuse_unknown(values, names | of_adapters if has_adapters else names, unfit)
    serving = settings.read(PolymorphSettings, values)
    completed = model_config.complete(config, front_signature(values))
    engines = settings.read(TextEngineSettings, values)
    front = TextFrontConfig(folder.name, folder, completed, engines, serving)
    if not has_adapters:
        return front
    allowed = "native, or auto, which means it: the only provider that serves adapters (adapter_mb)"
    require(engines.provider in ("auto", "native"), "provider", engines.provider, allowed)
    allowed = "inline, or auto, which means it: adapters (adapter_mb) are in the front's own process"
    require(serving.placement in ("auto", "inline"), "placement", serving.placement, allowed)
    return replace(
        front,
        settings=replace(engines, provider="native"),
        serving=replace(serving, placement="inline"),
        adapters=settings.read(AdapterSettings, values),
    )


def check(front: TextFrontConfig, paths: BuildPaths) -> Plan:
    """What to build. Raises the error of what cannot be built, as far as files and settings show it."""
    planned = plan(front, paths)
    length_histogram(front)
    config = planned.checkpoint.config
    engine_outputs(planned, hidden_size(config))
    longest = longest_text(config)
    require(
        front.settings.max_tokens <= longest,
        "max_tokens",
        front.settings.max_tokens,
        f"at most {longest} for this checkpoint",
    )
    if family_of(config).pads:
        allowed = f"{longest}, to which this checkpoint's texts are padded"
        require(front.settings.max_tokens == longest, "max_tokens", front.settings.max_tokens, allowed)
    if planned.labels and planned.head is None and not (family := family_of(config)).classifies:
        raise UnsupportedError(
            f"output: classifiers of model_type {family.name} are not served; those of {', '.join(FAMILIES)} are"
        )
    if planned.provider.name != "emulated":
        weight_headers.require_floats(weight_headers.read(planned.checkpoint.folder))
    if planned.checkpoint.tokenizer_file.is_file():
        # What transformers makes of it is checked by the build: it is slow to import.
        tokenizer_files.require_ids_below(planned.checkpoint.tokenizer_file, vocabulary_size(config))
    return planned


def publish(front: TextFrontConfig, paths: BuildPaths, progress: ProgressCallback) -> tuple[Manifest, Placement, str]:
    """Build the engines unless they are current, and write the folders of the front and of its workers.

    Returns the manifest, the placement, and how the engines were made.
    """
    planned = check(front, paths)
    engines = paths.engines / front.name
    how = UP_TO_DATE
    if not is_current(planned, engines):
        build(planned, engines, progress)
        how = BUILT
    result = manifest.load(engines)
    return result, _write_folders(planned, engines, result, paths), how


def _write_folders(planned: Plan, engines: Path, result: Manifest, paths: BuildPaths) -> Placement:
    """Write the folders with every `auto` replaced by the plan's choice. Returns the placement of the engines."""
    front = planned.front
    target = paths.generated / front.name
    placement = choose_placement(front.serving, result, len(planned.gpus))
    parameters = {
        "provider": result.provider,
        "precision": result.precision,
        "pooling": ",".join(planned.modules.pooling),
        "normalize": str(planned.modules.normalize).lower(),
        "labels": json.dumps(result.labels),
        "prompts": json.dumps(result.prompts),
        "engines": paths.portable(engines, target),
        "manifest_sha256": manifest.sha256(engines),
        "checkpoint_sha256": result.checkpoint_sha256,
        "answers_version": str(result.answers_version()),
        "profile": json.dumps(latency_profile(result)),
        **placement_parameters(placement, front, result),
        **device_plan.of_engines(result.provider, result.device_mb, result.files),
    }
    extra: dict[str, str] = {}
    if front.adapters is not None:
        base, version = adapters_base(planned, engines, front.adapters, result.checkpoint_sha256), front.folder / "1"
        parameters["checkpoint"] = paths.portable(planned.checkpoint.folder, target)
        parameters["checkpoint_name"] = front.settings.checkpoint
        parameters |= adapters.parameters(front.name, front.adapters, base, target, paths)
        extra |= adapters.multi_lora_files(version)
        adapters.prepare(front.name, front.adapters, base, version, paths)
    assert set(parameters) <= settings.names(
        TextEngineSettings, PolymorphSettings, GeneratedSettings, PlacementSettings, AdapterSettings
    )
    # A router holds no engines.
    device = planned.device if placement.name == "inline" else None
    summary = f"engines: {result.provider}, {result.precision}; {result.tolerance}"
    completed = with_dims(front.config, {output.name: output.dims for output in result.outputs})
    if (file := engines / REFERENCE).is_file():
        # A server may still have the engines of the build before.
        belongs_to = {"manifest_sha256": parameters["manifest_sha256"]}
        extra[REFERENCE] = json.dumps({**json.loads(file.read_text()), **belongs_to})
    config = write_front(front.folder, completed, target, parameters, summary, extra, device)
    write_workers(config, result, paths.generated, planned.gpus)
    return placement


def adapters_base(planned: Plan, engines: Path, params: AdapterSettings, sha256: str) -> BaseModel:
    """What adapters of the front are checked against."""
    # It imports torch.
    from shapeshift.adapter_cache.text.base import base_model

    folder = planned.checkpoint.folder
    names = base_names(planned.front.settings.checkpoint, folder, params.base_names)
    return base_model(engines, {str(folder), *names}, params.max_rank, folder, sha256)


def latency_profile(engines: Manifest) -> dict[str, object]:
    """The measured latencies for the generated config.pbtxt: milliseconds on one thread.

    Each point of `latency` is [tokens, median, 99th percentile, minimum].
    """
    return {
        "hardware": engines.hardware,
        "provider": f"{engines.provider} {engines.provider_version}",
        "precision": engines.precision,
        "engines": [
            {
                "tokens": entry.tokens,
                "rows": entry.rows,
                "latency": [[point.tokens, point.median_ms, point.p99_ms, point.best_ms] for point in entry.latency],
            }
            for entry in engines.engines
        ],
    }
