"""The chat demo: its files, its template, and the form of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from shapeshift.engines.text import chat_template_files
from shapeshift.serving.chat_templates.conversation import ChatTemplate

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).resolve().parents[2] / "checkpoints" / "docstrings-chat"
MOST_BYTES = 8_000_000
END = 4099
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is len? "},
    {"role": "assistant", "content": "Return the number of items in a container."},
    {"role": "user", "content": "And sorted?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_small_and_safe() -> None:
    kept = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert sum(kept.values()) <= MOST_BYTES
    assert set(kept) == {
        *("README.md", "train.py", "questions.py", "config.json", "generation_config.json", "chat_template.jinja"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == [END, 1]


def test_the_template_writes_what_transformers_writes(tokenizer: Any) -> None:
    files = chat_template_files.read(FOLDER)
    assert files.text is not None
    template = ChatTemplate(files.text, files.special_tokens)
    text = template.render(CHAT, None)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|bos|><|system|>Be brief.<|end|><|user|>What is len?<|end|><|assistant|>Return ")
    assert text.endswith("<|user|>And sorted?<|end|><|assistant|>")
    with pytest.raises(TemplateError, match="roles are system, user and assistant, not tool"):
        template.render([{"role": "tool", "content": "4"}], None)


@pytest.mark.parametrize("question", ["What does os.path.join do?", "Explain json.dumps.", "Hello"])
def test_an_answer_is_one_sentence(question: str, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    asked = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(ids["input_ids"], max_new_tokens=80, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert found[-1] == END, "it ends by itself"
    answer = tokenizer.decode(found, skip_special_tokens=True)
    assert len(answer) >= 12 and answer.endswith((".", "!", "?")) and "\n\n" not in answer


def test_readme_states_the_size() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert f"{model.num_parameters():,}" in (FOLDER / "README.md").read_text()
