"""Mixtures of experts: their kernels against plain torch, their weights in files and memory, and what is refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.loading import need_of
from shapeshift.fused_decode.model import native_operations, weights
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.model.assembly import linear_makers
from shapeshift.fused_decode.model.cpu_runtime import DTYPES, DecodeModel, ModelOptions
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.fused_decode.model.experts import ExpertMlps, choose
from shapeshift.fused_decode.model.parts import Experts
from shapeshift.fused_decode.model.shared_weights import read
from shapeshift.fused_decode.model.tensor_layout import stored_parts, weight_bytes
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import FusedDecodeSettings, computed
from tests.fused_decode.decode_models import VOCAB, Tiny, batch, texts
from tests.fused_decode.families import CASES, MIXTURES, make, reference_logits

HIDDEN, WIDTH = 72, 40
LOGITS_TOLERANCE = 1e-4
CLAMPED = {"alpha": 1.7, "limit": 0.8}
LLAMA4 = {**CASES["llama4_text"], "num_experts_per_tok": 1}
MOE_CONFIG = {**CASES["qwen3_moe"], "num_experts": 128, "num_experts_per_tok": 8}


@pytest.fixture(scope="module", autouse=True)
def operations(kernel_cache: Path) -> None:
    assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    return cache(lambda name: make(name, tmp_path_factory.mktemp("family")))


def experts_of(precision: str, experts: Experts, biased: bool) -> ExpertMlps:
    chance = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance)

    makers = linear_makers(precision, 0, DTYPES[computed(precision)], True)

    def linear(outputs: int, inputs: int) -> Any:
        weight, bias = (normal(outputs, inputs) * 0.2).to(makers.dtype), normal(outputs).to(makers.dtype)
        return makers.linear(weight, bias if biased else None)

    widths = [*[experts.width] * experts.count, *([experts.shared] if experts.shared else [])]
    router = native_operations.NativeLinear(normal(experts.count + experts.shared_gate, HIDDEN), None)
    gate_up, down = ([linear(2 * width, HIDDEN) for width in widths], [linear(HIDDEN, width) for width in widths])
    return ExpertMlps(experts, router, gate_up, down)


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("fields", "biased"),
    [
        ({}, False),
        (CLAMPED, True),
        ({"shared": 56, "shared_gate": True}, False),
        ({"shared": 24, "gelu": True}, False),
        ({"shared": 40, "sigmoid": True, "shares": False, "scales_rows": True}, False),
    ],
)
def test_kernels_compute_what_torch_does(precision: str, fields: dict[str, Any], biased: bool) -> None:
    experts = Experts(count=6, chosen=3, width=WIDTH, **fields)
    mlps = experts_of(precision, experts, biased)
    dtype = DTYPES[computed(precision)]
    rows = torch.randn(1500, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    # One expert has no row, and another one all of them.
    scores = mlps.scores(rows).index_fill(1, torch.tensor([4]), -50.0).index_fill(1, torch.tensor([2]), 50.0)
    chosen, weights = choose(experts, scores)
    together = mlps.mixed_natively(rows, chosen, weights)
    plain = mlps.mixed(rows, chosen, weights)
    # A level, or a half, may be rounded the other way.
    tolerance = 1e-5 if precision == "f32" else 0.03
    assert (together.float() - plain.float()).abs().max() < tolerance * plain.float().abs().max()
    for place in (0, 1, 7, *range(1490, 1500)):
        one = slice(place, place + 1)
        alone = mlps.mixed_natively(rows[one], *choose(experts, scores[one]))
        assert torch.equal(alone[0], together[place]), "a row's result depends on the others"


def test_weights_of_the_chosen_are_those_of_their_own_softmax_or_of_all() -> None:
    scores = torch.tensor([[1.0, 4.0, 3.0, -2.0], [0.0, 0.0, 9.0, 8.0]])
    chosen, weights = choose(Experts(4, 2, WIDTH), scores)
    assert chosen.tolist() == [[1, 2], [2, 3]]
    assert torch.allclose(weights, torch.tensor([[4.0, 3.0], [9.0, 8.0]]).softmax(dim=-1))
    chosen, weights = choose(Experts(4, 2, WIDTH, shares=False), scores)
    assert chosen.tolist() == [[1, 2], [2, 3]]
    assert torch.allclose(weights, scores.softmax(dim=-1).gather(1, chosen))


def test_a_correction_and_groups_change_the_choice_and_no_weight() -> None:
    scores = torch.tensor([[3.0, -3.0, 2.0, 1.0, 0.5, 0.4]])
    fields: dict[str, Any] = {"sigmoid": True, "shares": False, "scale": 2.0}
    chosen, weights = choose(Experts(6, 2, WIDTH, **fields), scores)
    assert chosen.tolist() == [[0, 2]] and torch.allclose(weights, 2.0 * scores.gather(1, chosen).sigmoid())
    corrected = torch.tensor([0.0, 0.9, 0.0, 0.0, 0.0, 0.0])
    chosen, weights = choose(Experts(6, 2, WIDTH, **fields), scores, corrected)
    assert chosen.tolist() == [[0, 1]] and torch.allclose(weights, 2.0 * scores.gather(1, chosen).sigmoid())
    # The two highest of the middle group have the largest sum, though the highest of all is in another one.
    in_groups = Experts(6, 2, WIDTH, groups=3, chosen_groups=1, **fields)
    assert choose(in_groups, scores, torch.zeros(6))[0].tolist() == [[2, 3]]


def test_the_shared_expert_has_the_last_weight() -> None:
    scores = torch.tensor([[1.0, 2.0, -0.5]])
    _, weights = choose(Experts(2, 1, WIDTH, shared=8, shared_gate=True), scores)
    assert torch.allclose(weights, torch.tensor([[1.0, torch.sigmoid(torch.tensor(-0.5))]]))
    assert choose(Experts(2, 1, WIDTH, shared=8), scores[:, :2])[1].tolist() == [[1.0, 1.0]]


def test_rows_of_another_form_are_refused() -> None:
    mlps = experts_of("f32", Experts(3, 2, WIDTH), False)
    rows, chosen, weights = torch.zeros(2, HIDDEN), torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2)
    for given, message in (
        ((rows[:, :-1].contiguous(), chosen, weights), f"rows: must be \\[rows, {HIDDEN}\\]"),
        ((rows, chosen + 1, weights), "chosen: must be 0 to 2"),
        ((rows, chosen - 1, weights), "chosen: must be 0 to 2"),
        ((rows, chosen[:1], weights), "chosen: must be .* as weights"),
        ((rows.bfloat16(), chosen, weights), "rows: must be of the type of the weights"),
    ):
        with pytest.raises(RuntimeError, match=message):
            mlps.mixed_natively(*given)


# Whole models.


def load(folder: Path, kernels: Path, precision: str, **options: Any) -> DecodeModel:
    fields: dict[str, Any] = {"slots": 2, "max_length": 96, "threads": 2, "cache_dir": kernels} | options
    return DecodeModel.load(folder, ModelOptions(precision=precision, **fields), lambda line: None)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_quantised_logits_are_near_those_in_f32(
    family: Callable[[str], Tiny], kernel_cache: Path, name: str, precision: str
) -> None:
    text = texts(1, seed=5, shortest=40)[0]
    expected, found = (
        load(family(name).folder, kernel_cache, one).forward(batch([text], [0], [0])) for one in ("f32", precision)
    )
    # A token may get another expert.
    assert torch.cosine_similarity(expected, found).min() > (0.98 if precision == "int8" else 0.6)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_mapped_from_the_file_that_processes_share(
    family: Callable[[str], Tiny], kernel_cache: Path, tmp_path: Path, name: str
) -> None:
    text, library = texts(1, seed=5)[0], native_operations.library(kernel_cache)
    (tmp_path / library.name).symlink_to(library)
    first, second = (load(family(name).folder, tmp_path, "int8", checkpoint_sha256="0123456789abcdef") for _ in "ab")
    (file,) = tmp_path.glob("*.weights")
    assert {"1.gate_up.3.packed", "1.down.3.scales"} < read(file).tensors.keys()
    assert torch.equal(*(model.forward(batch([text], [0], [0])) for model in (first, second)))


@pytest.mark.parametrize("name", [*MIXTURES, "gemma4_text"])
def test_the_memory_plan_counts_what_is_held(family: Callable[[str], Tiny], name: str) -> None:
    architecture = Architecture.read(family(name).folder)
    reference = family(name).reference
    beside = (tensor for buffer, tensor in reference.named_buffers() if buffer.endswith(("correction_bias", "scalar")))
    held = sum(tensor.numel() for tensor in (*reference.parameters(), *beside))
    if "with experts" in name and name.startswith("gemma4"):
        # Values of the layer without a window are keys that another linear gives.
        held += 32 * architecture.hidden
    assert weight_bytes(architecture, "f32") == 4 * (held + (architecture.tied and VOCAB * architecture.hidden))
    assert weight_bytes(architecture, "bf16") * 2 == weight_bytes(architecture, "f32")


@pytest.mark.parametrize(("name", "hidden", "width"), [("qwen3_moe", 48, 40), ("gpt_oss", 48, 64)])
@pytest.mark.parametrize(("tokens", "pairs"), [(8, 1), (100_000, 0)])
def test_the_memory_plan_counts_what_the_experts_compute_in(
    family: Callable[[str], Tiny], name: str, hidden: int, width: int, tokens: int, pairs: int
) -> None:
    """Rows, both halves, their product: of all tokens of a step, or of as many as are computed together."""
    architecture = Architecture.read(family(name).folder)
    assert architecture.experts is not None
    chosen = architecture.experts.chosen
    decode = FusedDecodeSettings(checkpoint="c", prefill_tokens=tokens, max_concurrency=2)
    computed_together = (tokens + 2) * chosen if pairs else 4096 // chosen * chosen
    need = need_of(architecture, decode, "f32")
    working = need.total_mb - need.cache_mb - weight_bytes(architecture, "f32") / 2**20
    assert working * 2**20 == pytest.approx(4 * computed_together * (hidden + 3 * width))


def test_a_mixture_that_does_not_fit_is_refused_before_it_is_read(
    family: Callable[[str], Tiny], kernel_cache: Path
) -> None:
    folder = family("qwen3_moe").folder
    decode = FusedDecodeSettings(checkpoint=str(folder), max_length=64, precision="f32", memory_mb=1)
    with pytest.raises(InvalidInputError, match="memory_mb: got 1; at least"):
        loading.load_runtime(folder, decode, kernel_cache, "cpu", logging.getLogger(__name__))


def test_a_file_is_opened_once_for_the_tensors_of_all_experts(
    family: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(path: str, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    folder = family("qwen3_moe").folder
    files = WeightFiles(folder, Architecture.read(folder))
    monkeypatch.setattr(weights, "safe_open", counted)
    tensors = load_file(folder / "model.safetensors")
    for number in range(6):
        down, _ = files.linear(1, f"down.{number}", torch.float32)
        assert torch.equal(down, tensors[f"model.layers.1.mlp.experts.{number}.down_proj.weight"])
    assert len(opened) == 1


@pytest.mark.parametrize("width", [24, 48], ids=["square gate and up", "square down"])
@pytest.mark.parametrize("columns", [True, False], ids=["as published", "saved anew"])
def test_tensors_of_all_experts_are_read_either_way_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, columns: bool
) -> None:
    """One of the two is square, and lies as the other does."""
    case = CASES["qwen3_vl_moe"]
    text = {**case["text_config"], "moe_intermediate_size": width, "tie_word_embeddings": False}
    monkeypatch.setitem(CASES, "square", {**case, "text_config": text})
    tiny = make("square", tmp_path)
    if columns:
        file = tmp_path / "model.safetensors"
        tensors = {key: one.mT.contiguous() if ".experts." in key else one for key, one in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    architecture = Architecture.read(tmp_path)
    assert architecture.experts is not None and architecture.experts.columns == columns
    files, experts = WeightFiles(tmp_path, architecture), tiny.reference.model.language_model.layers[2].mlp.experts
    for name in ("gate_up", "down"):
        assert torch.equal(files.linear(2, f"{name}.3", torch.float32)[0], getattr(experts, f"{name}_proj")[3])


# MXFP4.


def in_mxfp4(folder: Path, copy: Path) -> Path:
    """A copy of gpt-oss whose experts are random in MXFP4."""
    tensors = load_file(folder / "model.safetensors")
    chance = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=chance, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=chance, dtype=torch.uint8)
    copy.mkdir()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return copy


def test_mxfp4_is_what_transformers_reads(kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "wide", {**CASES["gpt_oss"], "hidden_size": 64})
    folder = in_mxfp4(make("wide", tmp_path / "plain").folder, tmp_path / "packed")
    stated = Mxfp4Config(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=stated, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    architecture, text = Architecture.read(folder), texts(1, seed=9, shortest=50)[0]
    assert architecture.packed_bits == 8
    expected = reference_logits(Tiny("wide", reference, folder), text)[-1]
    off = load(folder, kernel_cache, "f32").forward(batch([text], [0], [0]))[0] - expected
    assert off.abs().max() < LOGITS_TOLERANCE * max(1.0, float(expected.abs().max()))
    # The levels are its values, so that only rows are rounded.
    files = WeightFiles(folder, architecture)
    for name in ("gate_up.1", "down.3"):
        levels, bias = files.levels(1, name, torch.float32)
        weight, same = files.linear(1, name, torch.float32)
        assert torch.equal(levels.weight(), weight) and bias is not None and same is not None
        assert torch.equal(bias, same)
    found = load(folder, kernel_cache, "int8").forward(batch([text], [0], [0]))[0]
    assert torch.cosine_similarity(found, expected, dim=0) > 0.98


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok: got 129; at most num_experts \(128\)"),
        ({"num_experts": 0}, "num_experts: got 0; a whole number of at least 1"),
        ({"num_experts": 1 << 20}, "num_experts: got 1048576; at most 1024 experts"),
        ({"num_experts": 1024, "num_hidden_layers": 1000}, "num_experts: got 1024; at most 131 experts"),
        ({"num_local_experts": 4}, r"num_experts_per_tok: got 8; at most num_local_experts \(4\)"),
        ({"num_local_experts": 2000}, "num_local_experts: got 2000; at most 1024 experts"),
        ({**CASES["glm4_moe"], "n_routed_experts": 2}, r"num_experts_per_tok: got 3; at most n_routed_experts \(2\)"),
        ({**CASES["ernie4_5_moe"], "moe_num_experts": 2000}, "moe_num_experts: got 2000; at most 1024 experts"),
        ({**CASES["ernie4_5_moe"], "moe_k": 9}, r"moe_k: got 9; at most moe_num_experts \(6\)"),
        (
            {**CASES["gemma4_text, with experts"], "top_k_experts": 9},
            r"top_k_experts: got 9; .* num_experts \(6\)",
        ),
        ({"scoring_func": "sigmoid"}, "scoring_func: got 'sigmoid'; softmax"),
        ({"n_group": 4}, "n_group: got 4; 1: no router of groups"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: got 0; a whole number of at least 1"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers: got \[3\]; numbers of layers, 0 to 2"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv: got 8.0; null"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 8}, "model_type: got 'deepseek_v3'; this one has latent"),
        ({**CASES["glm4_moe"], "n_group": 4}, r"n_group: got 4; a divisor of n_routed_experts \(6\)"),
        ({**CASES["glm4_moe"], "topk_group": 4}, r"topk_group: got 4; at most n_group \(3\)"),
        ({**CASES["glm4_moe"], "topk_group": 1}, "topk_group: got 1; .* room for 3 experts"),
        ({**CASES["glm4_moe"], "scoring_func": "softmax"}, "scoring_func: got 'softmax'; sigmoid"),
        ({**CASES["ernie4_5_moe"], "use_bias": True}, "use_bias: got True; false or absent: experts have no biases"),
        ({**CASES["hunyuan_v1_moe"], "moe_topk": [1, 2, 2]}, r"moe_topk: got \[1, 2, 2\]; the same for all layers"),
        ({**CASES["exaone_moe"], "mlp_layer_types": ["moe"]}, r"mlp_layer_types: got \['moe'\]; 3 of dense, sparse"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method: got 'mxfp4'; not with a qwen3_moe"),
        ({**CASES["gemma4_text"], "num_kv_shared_layers": 5}, "num_kv_shared_layers: got 5; fewer than the 6 layers"),
        ({**CASES["gemma4_text"], "vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input: got 5; vocab_size"),
        ({**CASES["gemma4_text"], "per_layer_config": {"9": {}}}, "per_layer_config: got .*; .* of the layers 0 to 5"),
        ({**CASES["gemma4_text"], "global_head_dim": 7}, "global_head_dim: got 7; even"),
        ({**LLAMA4, "moe_layers": [3]}, r"moe_layers: got \[3\]; numbers of layers, 0 to 2"),
        ({**LLAMA4, "layer_types": ["sliding_attention"]}, "layer_types: got .*; 3 of chunked_attention"),
        (
            {**CASES["gpt_oss"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
            "quant_method: got 'fp8'; not with a gpt_oss",
        ),
    ],
)
def test_what_is_not_served_of_a_mixture_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        stored_parts(from_config({**MOE_CONFIG, **changes}))


@pytest.mark.parametrize("name", ["qwen3_moe", "ernie4_5_moe", "gpt_oss", "glm4_moe", "qwen3_vl_moe"])
def test_a_count_that_the_weights_do_not_have_is_named_as_in_config_json(
    family: Callable[[str], Tiny], tmp_path: Path, name: str
) -> None:
    key = {"ernie4_5_moe": "moe_num_experts", "glm4_moe": "n_routed_experts"}.get(name, "num_local_experts")
    shutil.copytree(family(name).folder, tmp_path / "copy")
    text = (tmp_path / "copy" / "config.json").read_text()
    count = int(re.findall(rf'"{key}": (\d+)', text)[0])
    (tmp_path / "copy" / "config.json").write_text(text.replace(f'"{key}": {count}', f'"{key}": {count + 6}'))
    with pytest.raises(InvalidInputError, match=f"{key}: got {count + 6}; {count}: the weights hold so many experts"):
        Architecture.read(tmp_path / "copy")


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_experts_that_config_json_does_not_count_are_named(
    family: Callable[[str], Tiny], tmp_path: Path, change: str
) -> None:
    config = json.loads((family("qwen3_moe").folder / "config.json").read_text())
    count = config["num_local_experts"] + (1 if change == "fewer" else -1)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": count}))
    tensors = load_file(family("qwen3_moe").folder / "model.safetensors")
    for layer in range(3):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        tensors[gate] = torch.zeros(count, tensors[gate].shape[1])
    save_file(tensors, tmp_path / "model.safetensors")
    expected = r"experts\.5\..*no such tensor" if change == "more" else r"lacks the tensor .*experts\.6\..* and 8 more"
    with pytest.raises(InvalidInputError, match=expected):
        WeightFiles(tmp_path, Architecture.read(tmp_path))


def test_experts_are_for_cpus(family: Callable[[str], Tiny]) -> None:
    with pytest.raises(InvalidInputError, match="num_local_experts: got 6; 0 on a GPU: the experts of qwen3_moe"):
        GraphedModel.load_on("cpu", family("qwen3_moe").folder, slots=1, max_length=32)
