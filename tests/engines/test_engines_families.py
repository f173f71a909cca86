"""Engines of every family in f32, compared with sentence-transformers and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.families import (
    FAMILIES,
    family_of,
    hidden_size,
    longest_text,
    text_config,
    vocabulary_size,
)
from shapeshift.engines.text.tokenizer import Encoded, TextTokenizer
from shapeshift.errors import InvalidInputError, UnsupportedError
from tests.engines.families import CONFIGS, VOCABULARY, outputs_of_engines, save_model, save_modules
from tests.sampling import few

LENGTHS = (5, 2, 17, 9, 3)
TEXTS = [" ".join(f"w{(7 * length + 3 * place) % 60}" for place in range(length)) for length in LENGTHS]


@pytest.fixture(autouse=True)
def quiet() -> None:
    import torch
    from transformers.utils import logging

    # Models this small only wait for the other threads.
    torch.set_num_threads(1)

    logging.disable_progress_bar()
    logging.set_verbosity_error()


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
        return model(torch.from_numpy(ids)[None], **kinds).logits[0].numpy()


# Of each way of packing one: offset positions, no pack, causal. The others are built by `make test-long`.
OFTEN = ("roberta", "deberta-v2", "qwen3", "gemma3_text")
# The library reads the tokenizers of qwen2 as Qwen's only; it is below.
EVERY_FAMILY = few((name for name in CONFIGS if name != "qwen2"), OFTEN)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_engines_compute_what_the_libraries_do(family: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    task = "AutoModelForSequenceClassification" if FAMILIES[family].classifies else "AutoModel"
    folder = save_model(tmp_path / "model", family, task, num_labels=3)
    save_modules(folder, pooling="lasttoken" if FAMILIES[family].causal else "mean")
    # Where positions count from the id of padding, a text that contains that token has fewer of them.
    texts = TEXTS if FAMILIES[family].first_position == 0 else [*TEXTS, "w1 <pad> w2 w3"]
    vectors = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts, batch_size=1)
    outputs = ("EMBEDDING", "LOGITS") if FAMILIES[family].classifies else ("EMBEDDING",)
    reference, ids = reference_of(folder, *outputs), ids_of(folder, texts)
    logits = [logits_of(folder, task, text) for text in ids] if "LOGITS" in outputs else []
    # The model tells the texts apart: an engine that ignores its input would not pass.
    assert min(np.ptp(values, axis=0).max() for values in (logits, vectors) if len(values)) > 0.05
    for found in outputs_of_engines(reference, ids, tmp_path):
        assert min(float(own["EMBEDDING"] @ vector) for own, vector in zip(found, vectors, strict=True)) > 0.99999
        np.testing.assert_allclose([own["LOGITS"] for own in found if logits], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("provider", ["openvino", "native", "torch"])
def test_a_decoder_that_attends_to_later_tokens(provider: str, tmp_path: Path) -> None:
    """As stella and gte-Qwen2 say in their config.json."""
    folder = save_model(tmp_path / "model", "qwen3", is_causal=False)
    reference, ids = reference_of(folder, "TOKEN_EMBEDDING"), ids_of(folder, TEXTS)
    expected = [reference.compute(text)["TOKEN_EMBEDDING"] for text in ids]
    other = reference.compute(np.append(ids[0], 7))["TOKEN_EMBEDDING"]
    assert np.abs(other[0] - expected[0][0]).max() > 0.05, "the first token sees the last one"
    for found in outputs_of_engines(reference, ids, tmp_path, provider):
        for own, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own["TOKEN_EMBEDDING"][: len(one)], one, atol=1e-4, rtol=0)


def test_a_classifier_of_the_last_token_passes_over_padding(tmp_path: Path) -> None:
    """Qwen's and Llama's checkpoints end texts with the token that pads them."""
    task = "AutoModelForSequenceClassification"
    folder = save_model(tmp_path / "model", "qwen2", task, num_labels=3, pad_token_id=3)
    reference, ids = reference_of(folder, "LOGITS"), [*ids_of(folder, TEXTS), np.array([3])]
    wanted = [logits_of(folder, task, text) for text in ids]
    without = [logits_of(folder, task, text[:-1]) for text in ids[:-1]]
    np.testing.assert_allclose(wanted[:-1], without, atol=1e-5)
    for found in outputs_of_engines(reference, ids, tmp_path):
        np.testing.assert_allclose([own["LOGITS"] for own in found], wanted, atol=1e-4, rtol=0)


def test_the_longest_text_of_families_that_count_from_the_padding() -> None:
    for model_type in ("roberta", "camembert", "longformer"):
        config = {"model_type": model_type, "max_position_embeddings": 514}
        assert [longest_text({**config, **more}) for more in ({}, {"pad_token_id": 1}, {"pad_token_id": 0})] == [
            *(512, 512, 513)
        ]
    assert longest_text({"model_type": "bert", "max_position_embeddings": 512}) == 512


def test_a_published_nomic_has_the_sizes_that_transformers_gives_it() -> None:
    """nomic-embed-text-v1.5 names them in GPT-2's words."""
    from transformers import AutoConfig

    published: dict[str, Any] = {
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_positions": 8192,
        "n_layer": 12,
        "vocab_size": 30528,
    }
    library, config = AutoConfig.for_model(**published), text_config(published)
    assert longest_text(config) == library.max_position_embeddings
    assert (hidden_size(config), vocabulary_size(config)) == (library.hidden_size, library.vocab_size)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_token_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    task = "AutoModelForTokenClassification"
    folder = save_model(tmp_path / "model", family, task, num_labels=5)
    reference, ids = reference_of(folder, "TOKEN_LOGITS"), ids_of(folder, TEXTS)
    wanted = [logits_of(folder, task, text) for text in ids]
    for found in outputs_of_engines(reference, ids, tmp_path):
        for own, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own["TOKEN_LOGITS"][: len(expected)], expected, atol=1e-4, rtol=0)
            assert not own["TOKEN_LOGITS"][len(expected) :].any()


@pytest.mark.parametrize(("family", "token_types"), [("bert", True), ("bert", False), ("roberta", True)])
def test_a_cross_encoder_scores_pairs(family: str, token_types: bool, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from torch import nn

    task = "AutoModelForSequenceClassification"
    folder = save_model(tmp_path / "model", family, task, token_types, num_labels=1)
    reference = reference_of(folder, "LOGITS", pairs=True)
    # RoBERTa tells the second text by the tokens between the two; and so does a BERT without types in its tokenizer's
    # model_input_names, for which transformers computes with zeros.
    assert reference.type_stride == (VOCABULARY if family == "bert" and token_types else 0)
    pairs = list(zip(TEXTS, TEXTS[1:], strict=False))
    tokenizer = TextTokenizer(folder / "tokenizer.json", 48, type_stride=reference.type_stride)
    reference.require_texts(tokenizer)
    ids = [tokenizer.encode_with_offsets(first.encode(), second.encode()).ids for first, second in pairs[:2]]
    wanted = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(
        pairs[:2], batch_size=1, activation_fn=nn.Identity()
    )
    for found in outputs_of_engines(reference, ids, tmp_path):
        np.testing.assert_allclose([own["LOGITS"][0] for own in found], wanted, atol=1e-4, rtol=0)


def test_a_pair_that_is_computed_otherwise_is_refused_by_example(tmp_path: Path) -> None:
    """As with token types where the library gives zeros, or without where it gives them."""
    for token_types in (True, False):
        folder = save_model(tmp_path / str(token_types), "bert", token_types=token_types)
        reference = reference_of(folder, "EMBEDDING", pairs=True)
        reference.type_stride = 0 if token_types else VOCABULARY
        tokenizer = TextTokenizer(folder / "tokenizer.json", 48, type_stride=reference.type_stride)
        with pytest.raises(UnsupportedError, match=r"EMBEDDING of \('a', .*\), \d+ tokens, is not what"):
            reference.require_texts(tokenizer)


class CutsTheBeginning(TextTokenizer):
    """What transformers cuts the end of."""

    def encode_with_offsets(self, text: bytes, *more: Any, **options: Any) -> Encoded:
        ids, offsets = super().encode_with_offsets(text, *more, **options)
        return Encoded(np.roll(ids, 1) if len(ids) == self.max_tokens else ids, offsets)


def test_a_text_that_fills_the_limit_is_compared_too(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert")
    reference = reference_of(folder, "EMBEDDING")
    limit = reference.max_tokens
    reference.require_texts(TextTokenizer(folder / "tokenizer.json", limit))
    with pytest.raises(UnsupportedError, match=rf"\.\.\.., {limit} tokens, is not what transformers computes"):
        reference.require_texts(CutsTheBeginning(folder / "tokenizer.json", limit))


def test_of_texts_with_the_librarys_ids_two_are_computed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert")
    reference, calls = reference_of(folder, "EMBEDDING"), list[int]()
    reference.module().model.register_forward_hook(lambda *_: calls.append(1))
    reference.require_texts(TextTokenizer(folder / "tokenizer.json", 48))
    assert len(calls) == 4


def test_a_tokenizer_whose_tokens_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """As BERT's own class in transformers, which adds its special tokens where a checkpoint has none."""
    folder = save_model(tmp_path / "model", "bert")
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "w1": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([f"more{number}" for number in range(VOCABULARY)])
    last = tokenizer.get_vocab_size() - 1
    tokenizer.post_processor = processors.TemplateProcessing("$A end", "$A $B end", [("end", last)])
    tokenizer.save(str(folder / "tokenizer.json"))
    reference = reference_of(folder, "EMBEDDING")
    with pytest.raises(InvalidInputError, match=f"ids below {VOCABULARY}, the vocab_size: those that transformers' "):
        reference.require_texts(TextTokenizer(folder / "tokenizer.json", 48))


DENSE = {"in_features": 16, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
LINEAR = {"in_features": 8, "out_features": 6, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


FLAGS = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


@pytest.mark.parametrize(
    ("pooling", "dense", "normalize"),
    [
        ({"word_embedding_dimension": 16, **{f"pooling_mode_{flag}": True for flag in FLAGS}}, (), False),
        ("weightedmean", (DENSE, LINEAR), True),
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
