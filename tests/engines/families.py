"""Small random checkpoints of every family that polymorph serves, made by transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift.engines.execution.engine_set import pack, unpack
from shapeshift.engines.interfaces import PROVIDERS, Array, Ids
from tests.compiled import link_kernels

WORDS = 60
VOCABULARY = 64
_SPECIAL = ["<pad>", "<unk>", "<cls>", "<sep>"]
_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_WIDE = {**_SIZE, "intermediate_size": 32, "max_position_embeddings": 64}
_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

# The configuration of each family in `shapeshift.engines.text.families`, by model_type.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_WIDE},
    "roberta": {**_WIDE, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**_WIDE, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {**_WIDE, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 32,
        "max_position_embeddings": 64,
    },
    "mpnet": {**_WIDE, "pad_token_id": 1},
    "albert": {**_WIDE, "embedding_size": 8},
    "electra": {**_WIDE, "embedding_size": 8},
    # The first layer attends to all tokens, the second to the nearest four on each side.
    "modernbert": {
        **_WIDE,
        **_NO_ENDS,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "mean",
    },
    "eurobert": {**_WIDE, **_NO_ENDS, "num_key_value_heads": 1, "pad_token_id": 0, "mask_token_id": 1},
    "jina_embeddings_v3": {**_WIDE, "pad_token_id": 1, "type_vocab_size": 1},
    "gte": {**_WIDE, "pad_token_id": 1, "type_vocab_size": 1},
    "nomic_bert": {**_WIDE, "pad_token_id": 0},
    "deberta-v2": {
        **_WIDE,
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "qwen2": {**_WIDE, **_NO_ENDS, "num_key_value_heads": 1, "pad_token_id": 0},
    "qwen3": {**_WIDE, **_NO_ENDS, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "llama": {**_WIDE, **_NO_ENDS, "num_key_value_heads": 1, "pad_token_id": 0},
    # A token attends to the nearest four on each side, in the second layer to all.
    "gemma3_text": {
        **_WIDE,
        **_NO_ENDS,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": True,
    },
}


def save_model(
    folder: Path, model_type: str, task: str = "AutoModel", token_types: bool = True, **changes: Any
) -> Path:
    """Write a random checkpoint of a class of transformers, such as AutoModelForSequenceClassification.

    token_types: whether the tokenizer of a model that has token types gives them.
    """
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})
    model = getattr(transformers, task).from_config(config)
    for weight in model.parameters():
        # As they are drawn, the weights are too small for attention to prefer anything, and biases are zero.
        weight.data = weight.data * 15 if weight.ndim > 1 else weight.data + 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    causal = model_type in ("qwen2", "qwen3", "llama")
    pairs = token_types and getattr(config, "type_vocab_size", 0) > 1
    save_tokenizer(folder, config.pad_token_id, causal, pairs)
    return folder


def save_tokenizer(folder: Path, padding: int = 0, causal: bool = False, token_types: bool = False) -> None:
    """Write a tokenizer of the words w0, w1, ...; a causal model's puts one special token, behind the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = _SPECIAL[1::-1] + _SPECIAL[2:] if padding == 1 else _SPECIAL
    names = [*special, *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    single, pair = ("$A <sep>", "$A $B:1 <sep>:1") if causal else ("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1")
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<cls>", 2), ("<sep>", 3)]
    )
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<cls>", "sep_token": "<sep>"}
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **named).save_pretrained(folder)


def save_modules(
    folder: Path,
    pooling: Mapping[str, Any] | str = "mean",
    dense: Sequence[Mapping[str, Any]] = (),
    normalize: bool = True,
    prompts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the files of sentence-transformers around the checkpoint in `folder`. prompts: the whole file's content."""
    import torch
    from safetensors.torch import save_file

    stated = {"embedding_dimension": 16, "pooling_mode": pooling} if isinstance(pooling, str) else pooling
    kinds: list[tuple[str, str, Any]] = [("Transformer", "", {}), ("Pooling", "1_Pooling", stated)]
    kinds += [("Dense", f"{number}_Dense", config) for number, config in enumerate(dense, start=2)]
    kinds += [("Normalize", f"{2 + len(dense)}_Normalize", {})] if normalize else []
    for kind, path, config in kinds:
        (folder / path).mkdir(exist_ok=True)
        if kind in ("Pooling", "Dense"):
            (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            torch.manual_seed(len(path))
            weights = {"linear.weight": torch.randn(config["out_features"], config["in_features"])}
            bias = {"linear.bias": torch.randn(config["out_features"])} if config["bias"] else {}
            save_file({**weights, **bias}, folder / path / "model.safetensors")
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path, _) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return folder


def kernels_beside(folder: Path) -> Path:
    """An empty folder of engines below `folder`, with the compiled kernels where those of a project lie beside it."""
    target = folder / "engines" / "model"
    target.mkdir(parents=True, exist_ok=True)
    if not (folder / "kernels").exists():
        link_kernels(folder)
    return target


def outputs_of_engines(
    reference: Any, texts: Sequence[Ids], folder: Path, provider: str = "openvino"
) -> Iterator[list[dict[str, Array]]]:
    """The outputs of each text, from the dynamic engine and from a static one of 64 tokens, in f32.

    All texts share one engine call where the family packs rows.
    """
    made: Any = PROVIDERS[provider]
    folder = kernels_beside(folder) if provider == "native" else folder
    packs, offset = reference.packs_rows, reference.position_offset
    groups = [list(texts)] if packs else [[text] for text in texts]
    example = pack(groups[0][:2], 1 + sum(map(len, groups[0][:2])), len(groups[0][:2]), offset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.export(reference.module(), example, folder, "f32")
    slots = 8 if packs else 1
    made.compile(folder, "f32", 64, slots)
    runtime = made.open(folder, "f32", threads=1)
    for engine in (runtime.engine(None, None), runtime.engine(64, slots)):
        found: list[dict[str, Array]] = []
        for group in groups:
            length = engine.tokens or sum(map(len, group))
            values = unpack(engine.run(pack(group, length, engine.rows or len(group), offset)), group)
            found += [{name: rows[index] for name, rows in values.items()} for index in range(len(group))]
        yield found
