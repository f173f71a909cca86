"""GGUF models become checkpoint folders: names, numbers and configuration as transformers has them; faults by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.checkpoint import open_checkpoint, tensor_shapes
from shapeshift.engines.gguf import folder as gguf
from shapeshift.engines.gguf import tensors
from shapeshift.errors import InvalidInputError, NotFoundError
from tests.engines import gguf_models
from tests.engines.gguf_models import END, HEAD_DIM, HEADS, KV_HEADS, all_linears


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def made(file: Path, **options: Any) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """The checkpoint folder of a model that is written to `file`, and the tensors before they were quantised."""
    written = gguf_models.write(file, **options)
    return gguf.write(file, file.parent / "build" / "gguf"), written


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def numbers(folder: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return tensors.numbers(folder, tensors.read_index(folder)[name])


def rotated_apart(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows that rotate together, side by side in GGUF, half a head apart as in transformers."""
    halves = [weight[head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in range(heads)]
    return np.concatenate([np.concatenate([half[0::2], half[1::2]]) for half in halves])


def test_the_folder_is_a_checkpoint(file: Path) -> None:
    folder, _ = made(file)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["num_key_value_heads"] == KV_HEADS and config["vocab_size"] == len(gguf_models.TOKENS)
    assert config["rms_norm_eps"] == pytest.approx(1e-5) and config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [END - 2, END], "<|endoftext|> and <|im_end|> end an answer"
    assert (folder / "chat_template.jinja").read_text() == gguf_models.TEMPLATE
    assert (folder / "model.gguf").resolve() == file.resolve()
    assert len(tensor_shapes(folder)) == 2 + 9 * gguf_models.LAYERS
    assert "quantization_config" not in config


def test_it_is_written_once_for_a_file(file: Path) -> None:
    folder, _ = made(file)
    before = (folder / "config.json").stat().st_mtime_ns
    assert gguf.write(file, folder.parent) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    gguf_models.write(file, changes={"llama.context_length": 64}, seed=1)
    other = gguf.write(file, folder.parent)
    assert other != folder and config_of(other)["max_position_embeddings"] == 64
    assert folder.is_dir(), "a published model may name it"


def test_files_of_one_name_keep_a_folder_each(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made(tmp_path / name / "model.gguf", seed=len(name))
    folders = {gguf.write(tmp_path / name / "model.gguf", tmp_path / "gguf") for name in ("one", "two")}
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders)


def test_tokens_of_any_type_end_answers_by_their_texts(file: Path) -> None:
    types = [1] * len(gguf_models.TOKENS)
    folder, _ = made(file, changes={"tokenizer.ggml.token_type": types})
    assert config_of(folder)["eos_token_id"] == [END - 2, END]
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in added if token["special"]] == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_have_the_values_of_the_file(file: Path, kind: str) -> None:
    folder, written = made(file, kinds={**all_linears(kind), "token_embd": kind})
    stored = GGMLQuantizationType[kind]
    for name, today in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        expected = dequantize(quantize(written[f"blk.1.{name}.weight"], stored), stored)
        assert np.array_equal(numbers(folder, f"model.layers.1.{today}.weight"), expected)
    assert np.array_equal(numbers(folder, "model.norm.weight"), written["output_norm.weight"])


@pytest.mark.parametrize(("part", "name", "heads"), [("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)])
def test_rows_that_rotate_together_lie_as_in_transformers(file: Path, part: str, name: str, heads: int) -> None:
    bias = np.arange(heads * HEAD_DIM, dtype=np.float32)
    folder, written = made(file, tensors={f"blk.0.{part}.bias": bias})
    expected = rotated_apart(written[f"blk.0.{part}.weight"], heads)
    assert np.array_equal(numbers(folder, f"model.layers.0.self_attn.{name}.weight"), expected)
    assert np.array_equal(numbers(folder, f"model.layers.0.self_attn.{name}.bias"), rotated_apart(bias, heads))


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_linears_in_levels_stay_as_they_are(file: Path, kind: str, bits: int) -> None:
    folder, _ = made(file, kinds=all_linears(kind))
    assert config_of(folder)["quantization_config"] == {"quant_method": "gguf", "bits": bits, "group_size": 32}


@pytest.mark.parametrize("other", ["Q8_0", "F16", "Q5_0"])
def test_linears_of_several_widths_become_numbers(file: Path, other: str) -> None:
    folder, _ = made(file, kinds={**all_linears("Q4_0"), "ffn_down": other})
    assert "quantization_config" not in config_of(folder)


def test_levels_with_and_without_minima_go_together(file: Path) -> None:
    folder, _ = made(file, kinds={**all_linears("Q4_0"), "ffn_down": "Q4_1", "attn_v": "Q4_1"})
    assert config_of(folder)["quantization_config"]["bits"] == 4


def test_divisors_of_frequencies_are_those_of_the_file(file: Path) -> None:
    divisors = np.linspace(1, 4, HEAD_DIM // 2, dtype=np.float32)
    folder, _ = made(file, tensors={"rope_freqs.weight": divisors})
    rope = config_of(folder)["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["attention_factor"] == 1.0
    assert rope["short_factor"] == rope["long_factor"] == [float(value) for value in divisors]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba2"}, "general.architecture: got 'mamba2'; one of llama"),
        ({"changes": {"llama.expert_count": 8}}, "llama.expert_count: got 8"),
        ({"changes": {"llama.rope.dimension_count": 8}}, "rope.dimension_count: got 8; 16"),
        ({"changes": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type: got 'longrope'"),
        ({"changes": {"llama.attention.value_length": 8}}, "llama.attention.value_length: got 8"),
        ({"changes": {"llama.feed_forward_length": [96, 64]}}, "llama.feed_forward_length: got"),
        ({"without": ("llama.block_count",)}, "llama.block_count: got None"),
        ({"tensors": {"blk.0.ssm_a.weight": np.ones(4, np.float32)}}, "blk.0.ssm_a.weight: got"),
        ({"changes": {"tokenizer.ggml.model": "rwkv"}}, "tokenizer.ggml.model"),
        ({"changes": {"tokenizer.ggml.pre": "of-tomorrow"}}, "tokenizer.ggml.pre"),
    ],
)
def test_what_is_not_served_is_refused_by_name(file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        made(file, **options)
    assert message in str(refused.value)
    assert not list((file.parent / "build" / "gguf").glob("*")), "nothing is left"


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(file: Path, share: float) -> None:
    gguf_models.write(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InvalidInputError, match=r"model\.gguf.*(GGUF file|whole)"):
        gguf.write(file, file.parent / "gguf")


def test_a_tensor_of_an_unknown_type_is_refused(file: Path) -> None:
    gguf_models.write(file)
    content = bytearray(file.read_bytes())
    name = b"output_norm.weight"
    # Behind the name come the number of dimensions, one size, and the type.
    kind = content.index(name) + len(name) + 4 + 8
    content[kind : kind + 4] = (99).to_bytes(4, "little")
    file.write_bytes(bytes(content))
    with pytest.raises(InvalidInputError, match="99"):
        gguf.write(file, file.parent / "gguf")


def test_a_pointer_of_git_is_refused(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InvalidInputError, match="Git LFS"):
        gguf.write(file, file.parent / "gguf")


def split(folder: Path) -> list[Path]:
    """One model in two files: the second has the tensors of the last layer."""
    whole = gguf_models.write(folder / "whole.gguf")
    (folder / "whole.gguf").unlink()
    parts = [folder / f"big-0000{part}-of-00002.gguf" for part in (1, 2)]
    from gguf import GGUFWriter

    for index, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        for key, value in {**gguf_models.METADATA, "split.count": 2, "split.no": index}.items():
            if index == 0 or key.startswith("split"):
                gguf_models.add(writer, key, value)
        writer.add_int32("split.tensors.count", len(whole))
        for name, values in whole.items():
            if ("blk.1" in name) == (index == 1):
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    parts = split(tmp_path)
    folder = gguf.write(parts[0], tmp_path / "gguf")
    entries = tensors.read_index(folder)
    assert {entry.file for entry in entries.values()} == {part.name for part in parts}
    assert open_checkpoint(folder).config["num_hidden_layers"] == 2
    parts[1].unlink()
    with pytest.raises(InvalidInputError, match="big-00002-of-00002.gguf.*missing"):
        gguf.write(parts[0], tmp_path / "gguf")


def paths_of(tmp_path: Path) -> BuildPaths:
    return BuildPaths(tmp_path, tmp_path / "build", tmp_path / "models")


def test_a_file_and_its_folder_name_the_same_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "small"
    place.mkdir(parents=True)
    gguf_models.write(place / "small.Q4_0.gguf", kinds=all_linears("Q4_0"))
    paths = paths_of(tmp_path)
    folders = {find_checkpoint(name, paths).folder for name in ("small", "small/small.Q4_0.gguf", str(place))}
    assert len(folders) == 1
    folder = folders.pop()
    assert folder.parent == tmp_path / "build" / "checkpoints" / "gguf"
    assert (folder / "small.Q4_0.gguf").is_file()


def test_of_several_models_in_a_folder_one_has_to_be_named(tmp_path: Path) -> None:
    for kind in ("F32", "Q8_0"):
        gguf_models.write(tmp_path / f"small.{kind}.gguf", kinds=all_linears(kind))
    with pytest.raises(InvalidInputError, match=r"small\.F32, small\.Q8_0"):
        find_checkpoint(str(tmp_path), paths_of(tmp_path))
    assert find_checkpoint(str(tmp_path / "small.F32.gguf"), paths_of(tmp_path)).folder.is_dir()


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="a file"):
        find_checkpoint(str(tmp_path / "no.gguf"), paths_of(tmp_path))


def test_a_build_folder_can_be_moved(tmp_path: Path) -> None:
    place = tmp_path / "build" / "checkpoints" / "small"
    place.mkdir(parents=True)
    gguf_models.write(place / "small.gguf")
    folder = find_checkpoint("small", paths_of(tmp_path)).folder
    (tmp_path / "build").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / folder.relative_to(tmp_path / "build")
    assert open_checkpoint(moved).config["model_type"] == "llama"
