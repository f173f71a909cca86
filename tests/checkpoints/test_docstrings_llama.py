"""The demo checkpoint of `generate`: its files, its use by transformers, and its loss on held-out text."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "docstrings-llama"
MOST_BYTES, MOST_PARAMETERS = 8_000_000, 4_000_000
VOCABULARY, BOS, EOS = 4096, 0, 1
HELD_OUT_LOSS = 5.1
"""The highest loss on held-out text, in nats a token; it is 4.85 with the text of CPython 3.11.7."""
ROWS, LENGTH = 8, 256


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings_corpus", FOLDER / "corpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_small_and_safe() -> None:
    kept = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert sum(kept.values()) <= MOST_BYTES
    assert set(kept) == {
        *("README.md", "train.py", "corpus.py", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json", "perplexity.txt"),
    }


def test_architecture(model: LlamaForCausalLM) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"] == [type(model).__name__]
    assert model.num_parameters() <= MOST_PARAMETERS
    assert config.tie_word_embeddings
    assert config.num_key_value_heads is not None
    assert config.num_key_value_heads < config.num_attention_heads
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (VOCABULARY, BOS, EOS)
    with safe_open(FOLDER / "model.safetensors", "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_readme_states_the_size(model: LlamaForCausalLM) -> None:
    assert f"{model.num_parameters():,}" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("text", ["Return the path.", "  naïve\n\tcafé 数 🙂 \x00", "<|bos|x>", "a\r\n\n  b   c "])
def test_tokens_become_the_text_again(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS and EOS not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    every = "".join(chr(code) for code in [*range(0x250), 0x20AC, 0x1F600])
    assert tokenizer.decode(tokenizer.encode(every).ids) == every


def test_transformers_makes_the_same_tokens(tokenizer: Tokenizer) -> None:
    text = 'The "with" statement  wraps\n\n    a block.'
    other = AutoTokenizer.from_pretrained(FOLDER)
    assert other(text)["input_ids"] == tokenizer.encode(text).ids
    assert (other.bos_token_id, other.eos_token_id) == (BOS, EOS)


def test_loss_on_held_out_text_is_low(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    documents = corpus().held_out()
    stream = torch.tensor([token for made in tokenizer.encode_batch(documents) for token in [*made.ids, EOS]])
    assert len(stream) > ROWS * LENGTH
    rows = stream[: ROWS * LENGTH].view(ROWS, LENGTH)
    with torch.inference_mode():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert loss < HELD_OUT_LOSS
    shuffled = rows[:, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))]
    with torch.inference_mode():
        assert model(input_ids=shuffled, labels=shuffled).loss.item() > loss + 1.0


def test_answers_end(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    prompt = torch.tensor([tokenizer.encode("Return the").ids])
    torch.manual_seed(0)
    made: torch.Tensor = model.generate(prompt.expand(8, -1), max_new_tokens=60, do_sample=True, temperature=0.7)
    assert (made == EOS).any(dim=1).sum() >= 2


def test_held_out_text_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read = corpus()
    library = read.library()
    monkeypatch.setattr(read, "modules", lambda: [library / name for name in (*read.HELD_OUT, "heapq.py", "heapq.py")])
    apart, trained = set(read.held_out()), read.training()
    assert len(apart) > 50
    assert len(trained) == len(set(trained))
    assert not apart & set(trained)
    assert any("heap" in text for text in trained) and any('"with" statement' in text for text in trained)


def test_generation_config_ends_answers() -> None:
    stated = json.loads((FOLDER / "generation_config.json").read_text())
    assert stated["eos_token_id"] == EOS
