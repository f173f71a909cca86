"""Adapters over encoders and classifiers: a front over native engines, held against PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.adapter_cache.text.front import LoraTextFront
from shapeshift.cli.main import main
from shapeshift.serving import model_args
from tests.adapter_cache.text_models import CLASSIFIER, ENCODER, computed_by_peft, save_adapter
from tests.engines.families import KERNELS, VOCABULARY, save_model
from tests.fakes import PbUtils, Request, as_served, ids_request
from tests.polymorph.conftest import args_of
from tests.waiting import wait_for

BERT = ["query", "key", "value", "dense"]
TARGETS: dict[str, list[str]] = {
    "bert": BERT,
    "roberta": BERT,
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
ROWS = [np.random.default_rng(length).integers(4, VOCABULARY, length) for length in (5, 1, 17, 30, 9)]
MakeFront = Callable[..., LoraTextFront]


class QuickFront(LoraTextFront):
    refresh_s = 0.05


def adapters_of(folder: Path, base: Path, family: str, kind: str = ENCODER) -> dict[str, Path]:
    """Of other ranks, scales and targets each."""
    targets = TARGETS[family]
    configs: dict[str, dict[str, Any]] = {
        "small": {"r": 4, "lora_alpha": 8, "target_modules": targets},
        "large": {"r": 64, "lora_alpha": 32, "target_modules": targets, "use_rslora": True},
        "first": {"r": 16, "lora_alpha": 16, "target_modules": targets[:1]},
    }
    return {
        name: save_adapter(folder / name, base, kind, seed, **config)
        for seed, (name, config) in enumerate(configs.items())
    }


@pytest.fixture
def build(tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that builds a front over a checkpoint; returns its generated folder."""
    monkeypatch.chdir(tmp_path)
    KERNELS.mkdir(parents=True, exist_ok=True)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "kernels").symlink_to(KERNELS)

    def make(checkpoint: Path, outputs: str = "", **parameters: object) -> Path:
        small = {"precision": "f32", "pooling": "mean", "max_tokens": 32, "profile_file": "", "adapter_mb": 4}
        stated = {"provider": "auto", "engine_threads": 2, **small, **parameters}
        folder = add_front(tmp_path / "model_repository", "front", checkpoint=checkpoint, **stated)
        text = (folder / "config.pbtxt").read_text().replace(" dims: [ 8 ]", "")
        (folder / "config.pbtxt").write_text(text.replace('"EMBEDDING"', f'"{outputs or "EMBEDDING"}"'))
        assert main(["engines"]) == 0
        return tmp_path / "build" / "repository" / "front"

    return make


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def opened(pb_utils: PbUtils) -> Iterator[Callable[..., LoraTextFront]]:
    """A function that starts the front of a folder; the fixture closes it, and checks that nothing is held."""
    started: list[LoraTextFront] = []

    def start(folder: Path, **parameters: object) -> LoraTextFront:
        front = as_served(QuickFront(pb_utils, model_args.read(args_of(folder, **parameters))))
        started.append(front)
        return front

    yield start
    for front in started:
        front.close()
        cache = front.adapters.cache
        cache.check_integrity()
        assert all(not one.users for one in cache.table.all()) and not cache.table.waiting


def asking(*rows: np.ndarray, adapter: str | None = None, output: str = "EMBEDDING", **parameters: Any) -> Request:
    named = {"lora_name": adapter} if adapter else {}
    return ids_request(*rows, outputs=(output,), parameters={**parameters, **named})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("kind", [ENCODER, CLASSIFIER])
def test_packs_of_several_adapters_are_what_peft_computes(
    family: str, kind: str, tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    base = save_model(tmp_path / "base", family, kind, num_hidden_layers=2)
    output = "EMBEDDING" if kind == ENCODER else "LOGITS"
    front = opened(build(base, output))
    adapters = adapters_of(tmp_path / "adapters", base, family, kind)
    for adapter, folder in adapters.items():
        assert main(["adapters", "--model", "front", "add", adapter, str(folder)]) == 0
    wait_for(lambda: len(front.adapters.catalogue) == len(adapters))
    names: list[str | None] = [None, *adapters, "small", None]
    requests = [asking(*ROWS, adapter=name, output=output) for name in names]
    front.execute(requests)
    plain = computed_by_peft(base, None, ROWS, kind)
    for name, request in zip(names, requests, strict=True):
        expected = computed_by_peft(base, adapters.get(name or ""), ROWS, kind)
        np.testing.assert_allclose(request.vectors(output), expected, atol=1e-4, rtol=0, err_msg=str(name))
        assert name is None or np.abs(expected - plain).max() > 0.01, "the adapter changes the result"
