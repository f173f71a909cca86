"""Engines of every family in f32, compared with sentence-transformers and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.families import FAMILIES, family_of
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.text.tokenizer import TextTokenizer
from tests.engines.families import CONFIGS, VOCABULARY, outputs_of_engines, save_model, save_modules

LENGTHS = (5, 2, 17, 9, 3)
TEXTS = [" ".join(f"w{(7 * length + 3 * place) % 60}" for place in range(length)) for length in LENGTHS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    yield


def reference_of(folder: Path, *outputs: str, pairs: bool = False) -> Any:
    from shapeshift.engines.text.reference_model import ReferenceModel

    checkpoint = open_checkpoint(folder)
    modules = sentence_modules.read(folder).resolved("auto", "auto", family_of(checkpoint.config).pooling)
    return ReferenceModel(checkpoint, modules, outputs, pairs=pairs)


def ids_of(folder: Path, texts: list[str]) -> list[Ids]:
    tokenizer = TextTokenizer(folder / "tokenizer.json", 48)
    return [tokenizer.encode(text.encode()) for text in texts]


def logits_of(folder: Path, task: str, ids: Ids, types: Ids | None = None) -> Array:
    """What transformers computes for one text."""
    import torch
    import transformers

    model = getattr(transformers, task).from_pretrained(folder).eval()
    kinds = {} if types is None else {"token_type_ids": torch.from_numpy(types)[None]}
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None], **kinds).logits[0].numpy()  # type: ignore[no-any-return]


def test_every_family_has_a_checkpoint_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_embeddings_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = save_model(tmp_path / "model", family)
    save_modules(folder, pooling="lasttoken" if FAMILIES[family].causal else "mean")
    wanted = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(TEXTS, batch_size=1)
    reference, ids = reference_of(folder, "EMBEDDING"), ids_of(folder, TEXTS)
    for row, text in enumerate(ids):
        assert reference.compute(text)["EMBEDDING"] @ wanted[row] > 0.99999
    for found in outputs_of_engines(reference, ids, tmp_path):
        assert min(float(own["EMBEDDING"] @ expected) for own, expected in zip(found, wanted, strict=True)) > 0.99999


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    task = "AutoModelForSequenceClassification"
    folder = save_model(tmp_path / "model", family, task, num_labels=3)
    reference, ids = reference_of(folder, "LOGITS"), ids_of(folder, TEXTS)
    wanted = [logits_of(folder, task, text) for text in ids]
    for found in outputs_of_engines(reference, ids, tmp_path):
        np.testing.assert_allclose([own["LOGITS"] for own in found], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_token_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    task = "AutoModelForTokenClassification"
    folder = save_model(tmp_path / "model", family, task, num_labels=5)
    reference, ids = reference_of(folder, "TOKEN_LOGITS"), ids_of(folder, TEXTS)
    wanted = [logits_of(folder, task, text) for text in ids]
    for found in outputs_of_engines(reference, ids, tmp_path):
        for own, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own["TOKEN_LOGITS"][: len(expected)], expected, atol=1e-4, rtol=0)
            assert not own["TOKEN_LOGITS"][len(expected) :].any()


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_cross_encoder_scores_pairs(family: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from torch import nn

    folder = save_model(tmp_path / "model", family, "AutoModelForSequenceClassification", num_labels=1)
    reference = reference_of(folder, "LOGITS", pairs=True)
    # RoBERTa tells the second text by the tokens between the two.
    assert reference.type_stride == (VOCABULARY if family == "bert" else 0)
    pairs = list(zip(TEXTS, TEXTS[1:], strict=False))
    tokenizer = TextTokenizer(folder / "tokenizer.json", 48, type_stride=reference.type_stride)
    ids = [tokenizer.encode_with_offsets(first.encode(), second.encode()).ids for first, second in pairs[:2]]
    wanted = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(
        pairs[:2], batch_size=1, activation_fn=nn.Identity()
    )
    for found in outputs_of_engines(reference, ids, tmp_path):
        np.testing.assert_allclose([own["LOGITS"][0] for own in found], wanted, atol=1e-4, rtol=0)


DENSE = {"in_features": 16, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
LINEAR = {"in_features": 8, "out_features": 6, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("pooling", "dense", "normalize"),
    [
        ("cls", (), True),
        ("max", (), False),
        ("mean_sqrt_len_tokens", (), False),
        ("weightedmean", (DENSE, LINEAR), True),
        ("lasttoken", (DENSE,), False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "word_embedding_dimension": 16}, (), True),
    ],
)
def test_sentence_modules_are_those_of_sentence_transformers(
    pooling: Any, dense: Any, normalize: bool, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = save_model(tmp_path / "model", "bert")
    prompts = {"prompts": {"query": "w1 w2: ", "passage": ""}, "default_prompt_name": "query"}
    save_modules(folder, pooling, dense, normalize, prompts)
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    reference = reference_of(folder, "EMBEDDING")
    for name, prompt in (("query", "w1 w2: "), ("passage", ""), (None, "w1 w2: ")):
        wanted = library.encode(TEXTS, batch_size=1, prompt_name=name)
        ids = ids_of(folder, [prompt + text for text in TEXTS])
        np.testing.assert_allclose([reference.compute(one)["EMBEDDING"] for one in ids], wanted, atol=1e-5, rtol=1e-4)
    for found in outputs_of_engines(reference, ids, tmp_path):
        np.testing.assert_allclose([own["EMBEDDING"] for own in found], wanted, atol=1e-5, rtol=1e-4)


def test_an_encoder_without_modules_is_pooled_by_its_family() -> None:
    assert SentenceModules().resolved("auto", "auto", "mean") == SentenceModules(("mean",), True)
