"""The classifiers of the cascade: their files, their texts, and the candidate of the demo."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from bench.cascade import zoo
from bench.common.public_data import SAMPLES
from shapeshift.cascade import candidates
from shapeshift.engines.text import heads

FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "text-classifiers"
FILES = sorted(FOLDER.glob("*.safetensors"))
LABELS = {"clinc150": 150, "domains": 10, "scope": 2, "sst2": 2}
HIDDEN = 384
MOST_BYTES = 1_000_000


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that reads the tasks' texts."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("texts", FOLDER / "texts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    # Its neighbours' names are those of other checkpoints' scripts, too.
    for name in ("tasks", "corpus"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_is_a_head_over_the_encoder(file: Path) -> None:
    task, layers = file.stem.split("-")
    assert file.stat().st_size <= MOST_BYTES
    weight, _ = heads.read_head(file)
    assert weight.shape == (LABELS[task], HIDDEN)
    # A tuned one updates the six linear layers of each layer.
    assert len(heads.read_updates(file)) == (6 * int(layers) if task == "sst2" else 0)
    with safe_open(file, framework="np") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"F16"}  # noqa: SIM118
        assert len(json.loads(opened.metadata()["labels"])) == LABELS[task]


def test_each_task_has_a_small_and_a_large_one() -> None:
    pairs = {task: {f"{task}-{layers}" for layers in layers} for task, layers in zoo.LAYERS.items()}
    pairs[zoo.DEMO] = {f"{zoo.DEMO}-1", f"{zoo.DEMO}-6"}
    assert {file.stem for file in FILES} == set.union(*pairs.values())


def test_the_demo_asks_the_small_one_first() -> None:
    chosen = candidates.serving(FOLDER / "candidates", zoo.DEMO)
    assert chosen.candidate.levels == zoo.FRONTS
    assert len(chosen.table.labels) == LABELS[zoo.DEMO]


def test_texts_out_of_scope_are_in_one_part_each(texts: Any, tmp_path: Path) -> None:
    sizes = {"train": 600, "val": 950, "test": 2400, "oos_train": 100, "oos_val": 100, "oos_test": 1000}
    data = {part: [[f"{part} {row}", "transfer"] for row in range(count)] for part, count in sizes.items()}
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(data))
    parts = texts.scope(tmp_path)
    counts = [Counter(label for _, label in parts[part]) for part in texts.PARTS]
    assert [count["out_of_scope"] for count in counts] == [500, 200, 500]
    assert [count["in_scope"] for count in counts] == [600, 900, 2250]
    rows = [row for part in texts.PARTS for row in parts[part]]
    assert len({text for text, _ in rows}) == len(rows)
    assert all(text.startswith("oos") == (label == "out_of_scope") for text, label in rows)


def test_each_domain_has_15_intents(texts: Any) -> None:
    intents, domains = (read(SAMPLES)["test"] for read in (texts.clinc150, texts.domains))
    pairs = {(domain, intent) for (_, domain), (_, intent) in zip(domains, intents, strict=True)}
    assert Counter(domain for domain, _ in pairs) == dict.fromkeys({label for _, label in domains}, 15)
