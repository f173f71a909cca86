"""The fronts of the demo: each technique as `make engines` built it, and its baseline over the same files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.common.front_variants import ENGINES, dynamic_only, publish_variant
from bench.common.models import write_front
from bench.common.output import BUILD, empty
from shapeshift.adapter_cache.registry import store
from shapeshift.adapter_cache.settings import UNUSED
from shapeshift.engines import manifest
from shapeshift.errors import NotFoundError

# As deep in the build folder as the built fronts, whose paths are relative.
REPOSITORY = BUILD / "demo"
ADAPTERS = [f"demo-{number:02d}" for number in range(24)]
_LORA = "generate_lora"
_SLOTS: Mapping[str, object] = {"max_concurrency": 8, "kv_cache_tokens": 1024}
# Little memory, so that adapters and texts compete for it.
_SMALL: Mapping[str, object] = {**_SLOTS, "adapters_dir": f"../../bench/{_LORA}", "starter_dir": "", "adapter_mb": 4}


@dataclass(frozen=True)
class Baseline:
    """What stands in for a front in its turn. parameters: of the requests; settings: of config.pbtxt."""

    model: str
    described: str
    parameters: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


BASELINES = {
    "encode": Baseline("encode_any_length", "one engine for any length"),
    "classify_image": Baseline("classify_image_plain", "the plain model", settings={"use_gammas": "0"}),
    "generate": Baseline("generate_alone", "one text at a time", settings={"max_concurrency": 1}),
    _LORA: Baseline(
        f"{_LORA}_fifo", "FIFO without a cache", settings={**_SMALL, "scheduler": "fifo", "eviction": UNUSED}
    ),
    "classify_text": Baseline("classify_text", "always the large model", {"level": 2}),
}
MODELS = tuple(dict.fromkeys([*BASELINES, *(one.model for one in BASELINES.values()), "classify_text_large"]))


def publish() -> Path:
    """Write all fronts; returns their repository. Raises NotFoundError where one has not been built."""
    empty(REPOSITORY)
    for name in (*BASELINES, "classify_text_large"):
        if not (BUILD / "repository" / name).is_dir():
            raise NotFoundError(f"no model {name} in {BUILD / 'repository'}: run `make engines`")
        _copy(name, name, _SMALL if name == _LORA else {})
    for name, baseline in BASELINES.items():
        if baseline.settings:
            _copy(name, baseline.model, baseline.settings)
    publish_variant(BASELINES["encode"].model, dynamic_only(manifest.load(ENGINES)), REPOSITORY)
    _register_adapters(BUILD / "adapters" / _LORA, BUILD / "bench" / _LORA)
    return REPOSITORY


def _copy(name: str, model: str, settings: Mapping[str, object]) -> None:
    shutil.copytree(BUILD / "repository" / name, REPOSITORY / model)
    write_front(REPOSITORY / model, REPOSITORY / model, settings)


def _register_adapters(source: Path, target: Path) -> None:
    """Register the adapters of `source` over and over, each time under another name: other ones to the server."""
    entries = sorted(store.read(source).items())
    if not entries:
        raise NotFoundError(f"no adapter in {source}: run `make engines`")
    empty(target)
    for number, name in enumerate(ADAPTERS):
        entry = entries[number % len(entries)][1]
        store.add(target, name, store.entry_folder(source, entry), pinned=False, base=entry.base)
