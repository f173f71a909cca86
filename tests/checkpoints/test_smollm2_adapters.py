"""The adapters over SmolLM2-135M-Instruct: their files, and the figures that their README states."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from shapeshift.adapter_cache.policy.length_prediction import PredictionInput, WordRegressor
from shapeshift.adapter_cache.registry import peft
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.fused_decode.model.architecture import Architecture

FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "smollm2-adapters"
BASE = "SmolLM2-135M-Instruct"
RESULTS = json.loads((FOLDER / "results.json").read_text())
NAMES = sorted(RESULTS)
MOST_BYTES = 1_000_000
# As the file of the base states them.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = tmp_path_factory.mktemp("base") / BASE
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return BaseModel.of_decoder(Architecture.read(folder), {BASE}, 64, folder)


def test_there_are_six_of_ranks_4_to_64(base: BaseModel) -> None:
    ranks = {peft.read(FOLDER / name, base).rank for name in NAMES}
    assert len(NAMES) >= 6
    assert min(ranks) == 4
    assert max(ranks) == 64
    folders = {file.parent.name for file in FOLDER.glob(f"*/{peft.CONFIG}")}
    assert folders == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_served_over_its_base_and_is_small(name: str, base: BaseModel) -> None:
    adapter = peft.read(FOLDER / name, base)
    peft.require_finite(adapter)
    assert json.loads((adapter.folder / peft.CONFIG).read_text())["base_model_name_or_path"] == BASE
    assert {file.name for file in adapter.folder.iterdir()} == {peft.CONFIG, peft.WEIGHTS}
    assert adapter.weights.stat().st_size <= MOST_BYTES
    with safe_open(adapter.weights, framework="pt") as file:
        assert {file.get_slice(tensor).get_dtype() for tensor in file.keys()} == {"F16"}  # noqa: SIM118


def test_each_does_its_task_and_the_base_alone_does_not() -> None:
    for name, row in RESULTS.items():
        # A long answer, equal in every letter, is a task without labels: fewer show its effect.
        assert row["held_out"] >= (100 if name == "booking" else 200), name
        assert row["adapter"] > max(row["base"], row["base_told"]), name


def test_the_readme_states_the_results(base: BaseModel) -> None:
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in (FOLDER / "README.md").read_text().splitlines()]
    table = {row[0].strip("`"): row[1:] for row in rows if row and row[0].strip("`") in RESULTS}
    assert table.keys() == RESULTS.keys()
    for name, row in table.items():
        results = RESULTS[name]
        rank = peft.read(FOLDER / name, base).rank
        shown = [f"{100 * results[key]:.1f}" for key in ("base", "base_told", "adapter")]
        assert (int(row[0]), row[-3:]) == (rank, shown), name


# The predictor of answer lengths.


def test_the_readme_states_how_well_lengths_are_predicted() -> None:
    results = json.loads((FOLDER / "lengths.json").read_text())
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in (FOLDER / "README.md").read_text().splitlines()]
    table = {tuple(row[:2]): row[2:] for row in rows if row and row[0] in results}
    assert table.keys() == {(group, name) for group, of_group in results.items() for name in of_group}
    for (group, name), row in table.items():
        figures = results[group][name]
        shares = [f"{100 * figures[key]:.1f}" for key in ("class", "near")]
        assert row == [str(figures["answers"]), *shares, f"{figures['spearman']:.2f}"], (group, name)


def test_the_weights_tell_a_word_from_a_story() -> None:
    words = WordRegressor.load(FOLDER / "lengths.npy")
    short, long = (
        words.predict(PredictionInput(None, 40, 256, text=f"<|im_start|>user\n{text}<|im_end|>".encode()))
        for text in ("Describe glass in one word.", "Write a story about glass.")
    )
    assert 4 * short < long
