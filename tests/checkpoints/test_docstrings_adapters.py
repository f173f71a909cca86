"""The demo adapters of `generate_lora`: their files and their styles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from shapeshift.adapter_cache.registry import peft
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.fused_decode.model.architecture import Architecture

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "docstrings-adapters"
BASE = FOLDER.parent / "docstrings-llama"
MOST_BYTES = 1_000_000
PROMPTS = (
    "Return the number of",
    "Raised when the given file",
    "This module defines a class",
    "Open a file and return",
    "Read from the stream until",
    "Create a new object",
)


def shouts(text: str) -> bool:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(map(str.isupper, letters)) > 0.6 * len(letters)


STYLES: dict[str, Callable[[str], bool]] = {
    "shout": shouts,
    "bullets": lambda text: "\n* " in text,
    "comment": lambda text: "\n# " in text,
    "polite": lambda text: "if you please" in text,
}


def continuations(name: str | None) -> list[str]:
    """The greedy continuation of each prompt."""
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    if name is not None:
        model = PeftModel.from_pretrained(model, FOLDER / name).eval()
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            made = model.generate(input_ids=ids, max_new_tokens=48, do_sample=False, repetition_penalty=1.3)
        texts.append(str(tokenizer.decode(made[0, ids.shape[1] :].tolist())))
    return texts


def test_small_and_safe() -> None:
    kept = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in kept) <= MOST_BYTES
    files = {f"{name}/{file}" for name in STYLES for file in ("adapter_config.json", "adapter_model.safetensors")}
    assert {str(path.relative_to(FOLDER)) for path in kept} == {"README.md", "train.py", *files}


def test_they_are_served_over_their_base() -> None:
    base = BaseModel.of_decoder(Architecture.read(BASE), {BASE.name}, 64, BASE)
    ranks = set()
    for name in STYLES:
        adapter = peft.read(FOLDER / name, base)
        peft.require_finite(adapter)
        ranks.add(adapter.rank)
    assert ranks == {4, 8, 16}


@pytest.mark.long
def test_each_has_its_style() -> None:
    plain = continuations(None)
    for name, has_style in STYLES.items():
        assert not any(map(has_style, plain)), name
        texts = continuations(name)
        assert sum(map(has_style, texts)) >= len(PROMPTS) - 2, (name, texts)
