"""Sparse vectors and vectors of single tokens, of engines in f32, compared with the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines.execution.engine_set import pack
from shapeshift.engines.interfaces import Array
from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import InvalidInputError, UnsupportedError
from tests.engines.families import VOCABULARY, outputs_of_engines, save_model, save_modules
from tests.engines.test_engines_families import TEXTS, ids_of, quiet, reference_of
from tests.sampling import few

__all__ = ["quiet"]
MLM = "AutoModelForMaskedLM"


def save_splade(folder: Path, family: str, **pooling: Any) -> Path:
    """A random SPLADE in the files that sentence-transformers writes."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    plain = save_model(folder.with_name("plain"), family, MLM)
    transformer = Transformer(str(plain), transformer_task="fill-mask")
    SparseEncoder(modules=[transformer, SpladePooling(**pooling)], device="cpu").save_pretrained(str(folder))
    return folder


OFTEN = ("bert", "distilbert", "xlm-roberta")
RARELY = ("modernbert", "mpnet", "albert", "electra", "deberta-v2")


@pytest.mark.parametrize("family", few((*OFTEN, *RARELY), OFTEN))
def test_terms_are_weighted_as_by_a_sparse_encoder(family: str, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    pooling = {"pooling_strategy": "sum", "activation_function": "log1p_relu"} if family == "bert" else {}
    folder = save_splade(tmp_path / "model", family, **pooling)
    library = SparseEncoder(str(folder), device="cpu", local_files_only=True)
    expected = library.encode(TEXTS, batch_size=1, convert_to_sparse_tensor=False).numpy()
    assert (expected > 0).any() and (expected == 0).any()
    reference = reference_of(folder, "TERM_WEIGHTS")
    reference.require_texts(TextTokenizer(folder / "tokenizer.json", 48))
    for results in outputs_of_engines(reference, ids_of(folder, TEXTS), tmp_path):
        got = np.stack([one["TERM_WEIGHTS"] for one in results])
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
        assert got.shape == (len(TEXTS), VOCABULARY)


def save_token_heads(folder: Path, width: int = 12) -> dict[str, Any]:
    """Write random heads of BGE-M3 into a checkpoint, and return their tensors."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    heads = {}
    for name, outputs in (("colbert_linear", width), ("sparse_linear", 1)):
        heads[name] = {"weight": torch.randn(outputs, 16), "bias": torch.randn(outputs)}
        save_file(heads[name], folder / f"{name}.safetensors")
    return heads


def of_flag_embedding(folder: Path, heads: dict[str, Any], text: str) -> tuple[Array, Array, dict[int, float]]:
    """Dense, ColBERT and lexical weights, in the words of FlagEmbedding's M3 (`_compute_single_score` and others)."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
        weights = torch.relu(torch.nn.functional.linear(hidden, **heads["sparse_linear"]))[0, :, 0].tolist()
        vectors = torch.nn.functional.linear(hidden[:, 1:], **heads["colbert_linear"])[0]
        dense = torch.nn.functional.normalize(hidden[:, 0], dim=-1)[0].numpy()
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    terms: dict[int, float] = {}
    for weight, token in zip(weights, inputs["input_ids"][0].tolist(), strict=True):
        if token not in unused and weight > 0:
            terms[token] = max(weight, terms.get(token, 0.0))
    return dense, torch.nn.functional.normalize(vectors, dim=-1).numpy(), terms


def test_one_pass_gives_the_three_vectors_of_bge_m3(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "xlm-roberta")
    save_modules(folder, pooling="cls")
    heads = save_token_heads(folder)
    reference = reference_of(folder, "EMBEDDING", "TOKEN_EMBEDDING", "TOKEN_WEIGHTS")
    reference.require_texts(TextTokenizer(folder / "tokenizer.json", 48))
    texts = [*TEXTS, "w5 w6 w5 unknown w6"]
    ids = ids_of(folder, texts)
    weighted = 0
    for results in outputs_of_engines(reference, ids, tmp_path):
        for text, row, result in zip(texts, ids, results, strict=True):
            dense, vectors, terms = of_flag_embedding(folder, heads, text)
            np.testing.assert_allclose(result["EMBEDDING"], dense, atol=1e-5)
            np.testing.assert_allclose(result["TOKEN_EMBEDDING"][1 : len(row)], vectors, atol=1e-5)
            assert not result["TOKEN_EMBEDDING"][0].any() and not result["TOKEN_EMBEDDING"][len(row) :].any()
            weights = result["TOKEN_WEIGHTS"][: len(row)]
            best = {token: weights[row == token].max() for token in {*row.tolist()}}
            assert {token for token, weight in best.items() if weight > 0} == {*terms}
            np.testing.assert_allclose([best[token] for token in terms], [*terms.values()], atol=1e-4)
            weighted += len(terms)
    assert weighted >= 10


def test_special_tokens_of_a_second_text_have_no_weight(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert")
    save_token_heads(folder)
    reference = reference_of(folder, "TOKEN_WEIGHTS", pairs=True)
    tokenizer = TextTokenizer(folder / "tokenizer.json", 48, type_stride=reference.type_stride)
    ids = tokenizer.encode_with_offsets(b"w5 w6", b"w7 unknown w9").ids
    inputs = pack([ids], len(ids), 1, 0, reference.type_stride)
    with torch.inference_mode():
        weights = reference.module()(*map(torch.from_numpy, inputs.values()))[0].numpy()
    np.testing.assert_allclose(weights, reference.compute(ids)["TOKEN_WEIGHTS"], atol=1e-5)
    assert reference.type_stride and (weights > 0).any()


def test_what_is_cast_moves_to_a_device_as_a_whole(tmp_path: Path) -> None:
    folder = save_modules(save_model(tmp_path / "model", "xlm-roberta"), pooling="cls")
    save_token_heads(folder)
    reference = reference_of(folder, "EMBEDDING", "TOKEN_EMBEDDING", "TOKEN_WEIGHTS")
    module = reference.module().cast(torch.bfloat16).to("meta")
    inputs = pack([np.arange(5), np.arange(9)], 14, 2, reference.position_offset)
    outputs = module(*(torch.from_numpy(values).to("meta") for values in inputs.values()))
    assert [str(values.device) for values in outputs] == ["meta"] * 3


def test_token_vectors_of_another_model_are_its_hidden_states(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = save_modules(save_model(tmp_path / "model", "qwen3"), pooling="lasttoken")
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = library.encode(TEXTS, batch_size=1, output_value="token_embeddings")
    for results in outputs_of_engines(reference_of(folder, "TOKEN_EMBEDDING"), ids_of(folder, TEXTS), tmp_path):
        for result, vectors in zip(results, expected, strict=True):
            np.testing.assert_allclose(result["TOKEN_EMBEDDING"][: len(vectors)], vectors, atol=1e-4, rtol=1e-4)


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert")
    save_token_heads(folder)
    (folder / "sparse_linear.safetensors").write_bytes((folder / "colbert_linear.safetensors").read_bytes())
    with pytest.raises(InvalidInputError, match=r"sparse_linear.safetensors: got .*; weight \[1, inputs\] and"):
        sentence_modules.read(folder)
    (folder / "sparse_linear.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="in_features: got 16; 24 in .*colbert_linear"):
        sentence_modules.read(folder).check(24)


def test_pooling_of_terms_is_one_of_the_librarys(tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "model", "bert")
    config = folder / "1_SpladePooling" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pooling_strategy": "mean"}))
    with pytest.raises(InvalidInputError, match="pooling_strategy: got 'mean'; one of max, sum"):
        sentence_modules.read(folder)
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*listed, {**listed[1], "path": "2_SpladePooling"}]))
    with pytest.raises(UnsupportedError, match="the modules are Transformer, SpladePooling, SpladePooling"):
        sentence_modules.read(folder)
