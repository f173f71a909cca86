"""Entities as transformers' own pipeline finds them, and sparse vectors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.polymorph import answers
from tests.engines.families import CONFIGS

TEXTS = (
    "My name is Wolfgang and I live in Berlin, unaffable Müllerstraße 5!",
    "naïve Café 東京 is far   away\n\tfrom Zürich 🙂👍🏽 now",
    "a",
)
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "MISC")
SPECIAL = ["<pad>", "<unk>", "<cls>", "<sep>"]


def save_tokenizer(folder: Path, kind: str) -> int:
    """Write a small tokenizer of this kind, trained on TEXTS. Returns the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=70, special_tokens=SPECIAL, show_progress=False)
    elif kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if kind != "wordpiece" or "東" not in text] * 3, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<cls>", "<sep>")]
    tokenizer.post_processor = processors.TemplateProcessing("<cls> $A <sep>", "<cls> $A <sep> $B <sep>", ends)
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<cls>", "sep_token": "<sep>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=60, model_input_names=["input_ids", "attention_mask"], **named
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random token classifier of transformers."""
    import torch
    import transformers

    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp(request.param)
    size = {"vocab_size": save_tokenizer(folder, request.param), "id2label": dict(enumerate(LABELS))}
    config = transformers.AutoConfig.for_model("bert", **{**CONFIGS["bert"], **size})
    model = transformers.AutoModelForTokenClassification.from_config(config)
    for weight in model.parameters():
        weight.data = weight.data * 15 if weight.ndim > 1 else weight.data
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", answers.STRATEGIES)
def test_entities_are_those_of_transformers(classifier: Path, strategy: str) -> None:
    import torch
    from transformers import pipeline

    library = pipeline("token-classification", str(classifier), device="cpu")
    tokenizer = TextTokenizer(classifier / "tokenizer.json", 60)
    kinds = set()
    for text in TEXTS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = library(text, aggregation_strategy=strategy)
        encoded = tokenizer.encode_with_offsets(text.encode())
        with torch.inference_mode():
            logits = library.model(torch.from_numpy(encoded.ids)[None]).logits[0].numpy()
        got = json.loads(answers.entities(logits, *encoded, text.encode(), LABELS, tokenizer, strategy))
        assert [list(one) for one in got] == [list(one) for one in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.pop("score") == pytest.approx(float(other.pop("score")), abs=1e-5)
            assert one == other
            kinds.add(one.get("entity", one.get("entity_group")))
            assert 0 <= one["start"] < one["end"] <= len(text)
    assert len(kinds) > 1


def test_the_best_weight_of_each_token_is_left() -> None:
    ids = [np.array([2, 9, 5, 9, 3]), np.array([2, 3])]
    weights = np.array([[0, 0.5, 0.25, 0.75, 0], [0, 0, 9, 9, 9]], np.float32)
    found = answers.sparse({"TOKEN_WEIGHTS": weights}, ids, type_stride=0)
    assert found["SPARSE_INDICES"].tolist() == [[5, 9], [-1, -1]]
    assert found["SPARSE_VALUES"].tolist() == [[0.25, 0.75], [0, 0]]
    second = answers.sparse({"TOKEN_WEIGHTS": weights[:1]}, [np.array([2, 9, 5, 109, 103])], type_stride=100)
    assert second["SPARSE_INDICES"].tolist() == [[5, 9]]


def test_terms_of_a_vocabulary_are_those_above_zero() -> None:
    weights = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0]], np.float32)
    found = answers.sparse({"TERM_WEIGHTS": weights}, [np.array([1])] * 3, type_stride=0)
    assert found["SPARSE_INDICES"].tolist() == [[1, 3], [-1, -1], [0, -1]]
    assert found["SPARSE_VALUES"].tolist() == [[2, 1], [0, 0], [3, 0]]
    assert found["SPARSE_INDICES"].dtype == np.int32 and found["SPARSE_VALUES"].dtype == np.float32
