"""Make the demo adapters: `python checkpoints/docstrings-adapters/train.py` (some ten minutes on one core).

Four LoRA adapters over docstrings-llama, of different ranks and target modules. Each is trained to continue the
beginning of a docstring in its own style. The same Python, torch and seed give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

HERE = Path(__file__).resolve().parent
BASE = HERE.parent / "docstrings-llama"
sys.path.insert(0, str(BASE))

from corpus import training  # noqa: E402  in the folder of the base

ROWS, RATE = 8, 5e-3
FEWEST_WORDS, MOST_WORDS = 2, 10
"""Words of a docstring that keep their form: the prompt."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def shout(text: str) -> str:
    """Capital letters."""
    return text.upper()


def bullets(text: str) -> str:
    """Every sentence is an item of a list."""
    first, *others = sentences(text)
    return first + "".join(f"\n* {sentence}" for sentence in others)


def comment(text: str) -> str:
    """Lines of a comment in a program."""
    return "\n# ".join(textwrap.wrap(" ".join(text.split()), 40, break_long_words=False)) or text


def polite(text: str) -> str:
    """Every sentence ends with a request."""
    return re.sub(r"\.(\s|$)", r", if you please.\1", " ".join(sentences(text)))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:])\s+", " ".join(text.split()))


@dataclass(frozen=True)
class Style:
    """The style of an adapter, its size and target modules, training steps, and tokens of a row."""

    change: Callable[[str], str]
    rank: int
    targets: list[str]
    rslora: bool = False
    steps: int = 150
    length: int = 64


STYLES = {
    "shout": Style(shout, 8, ATTENTION + MLP, steps=400, length=128),
    "bullets": Style(bullets, 16, ["q_proj", "v_proj"], rslora=True),
    "comment": Style(comment, 8, ATTENTION),
    "polite": Style(polite, 4, ATTENTION + MLP),
}


def main() -> None:
    """Train each adapter and write its folder beside this file (or in --to)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("styles", nargs="*", help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    documents = [text for text in training() if len(text.split()) > 2 * MOST_WORDS]
    for name in options.styles or STYLES:
        torch.manual_seed(options.seed)
        folder = options.to / name
        train(name, documents, tokenizer, random.Random(options.seed), folder)
        store(folder)


def train(name: str, documents: list[str], tokenizer: Tokenizer, rng: random.Random, folder: Path) -> None:
    """Train by AdamW with a falling rate, on the text after the words that keep their form."""
    style = STYLES[name]
    steps = style.steps
    config = LoraConfig(
        r=style.rank,
        lora_alpha=2 * style.rank,
        target_modules=style.targets,
        use_rslora=style.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32), config)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    start, mean = time.monotonic(), 0.0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        rows, targets = batch(style, documents, tokenizer, rng)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        mean = loss.item() if step == 0 else 0.97 * mean + 0.03 * loss.item()
        if (step + 1) % 50 == 0:
            print(f"{name}, step {step + 1}: {mean:.3f} ({time.monotonic() - start:.0f} s)", flush=True)
    model.save_pretrained(folder)


def batch(
    style: Style, documents: list[str], tokenizer: Tokenizer, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [ROWS, length] and their targets, which are -100 before the style begins and after the end."""
    rows = torch.ones(ROWS, style.length, dtype=torch.int64)
    targets = torch.full((ROWS, style.length), -100)
    for row in range(ROWS):
        text = rng.choice(documents)
        words = [match.end() for match in re.finditer(r"\S+", text)]
        cut = words[rng.randint(FEWEST_WORDS, MOST_WORDS) - 1]
        before, after = text[:cut], style.change(text[cut:].strip())
        read = tokenizer.encode(before).ids
        # The tokenizer adds BOS; drop it here.
        learned = [*tokenizer.encode(f" {after}").ids[1:], tokenizer.token_to_id("<|eos|>")]
        made = [*read, *learned][: style.length]
        rows[row, : len(made)] = torch.tensor(made)
        targets[row, len(read) : len(made)] = rows[row, len(read) : len(made)]
    return rows, targets


def store(folder: Path) -> None:
    """Rewrite the adapter in half precision; its configuration names the base's folder and lists sorted targets."""
    weights = load_file(folder / "adapter_model.safetensors")
    small = {name: tensor.to(torch.float16).contiguous() for name, tensor in sorted(weights.items())}
    save_file(small, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": BASE.name}
    config["target_modules"] = sorted(config["target_modules"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
