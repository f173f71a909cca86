"""Make the chat demo: `python checkpoints/docstrings-chat/train.py` (some ten minutes on one core).

Trains docstrings-llama further on conversations of questions.py, with four tokens more. The same Python, torch and seed
give the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import torch
from questions import Turn, conversation, facts
from tokenizers import AddedToken, Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
BASE = HERE.parent / "docstrings-llama"
BOS, ROLES, END = "<|bos|>", ("<|system|>", "<|user|>", "<|assistant|>"), "<|end|>"
ROWS, LENGTH, STEPS = 6, 160, 900
PEAK, LAST, WARM_UP = 1.5e-3, 5e-5, 50
IGNORED = -100


def main() -> None:
    """Train, and write the checkpoint's files beside this file (or to --to)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--to", type=Path, default=HERE)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.to.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(options.to)
    known = facts()
    print(f"{len(known)} facts", flush=True)
    model = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model.resize_token_embeddings(tokenizer.get_vocab_size())
    train(model, tokenizer, known, options.steps, random.Random(options.seed))
    model.config.eos_token_id = tokenizer.token_to_id(END)
    model.to(torch.bfloat16).save_pretrained(options.to)
    write_configs(options.to, model.config.eos_token_id)


def write_tokenizer(folder: Path) -> Tokenizer:
    """The base's tokenizer with the tokens of conversations."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*ROLES, END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_configs(folder: Path, end: int) -> None:
    """Write the configuration files, also for releases of transformers before 5."""
    GenerationConfig(bos_token_id=0, eos_token_id=[end, 1], pad_token_id=1).save_pretrained(folder)
    model_config = json.loads((folder / "config.json").read_text())
    model_config |= {"rope_theta": model_config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(model_config, indent=2) + "\n")
    tokenizer_config = json.loads((BASE / "tokenizer_config.json").read_text()) | {"eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    if folder != HERE:
        shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")


def encode(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """The tokens of a conversation as chat_template.jinja writes it, and the targets: the answers only."""
    ids = [tokenizer.token_to_id(BOS)]
    targets = [IGNORED]
    for question, answer in turns:
        asked = tokenizer.encode(f"<|user|>{question}{END}<|assistant|>", add_special_tokens=False).ids
        told = tokenizer.encode(f"{answer}{END}", add_special_tokens=False).ids
        ids += asked + told
        targets += [IGNORED] * len(asked) + told
    return ids[:LENGTH], targets[:LENGTH]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, known: list[Turn], steps: int, rng: random.Random) -> None:
    """Train by AdamW with a warm-up and a cosine; every step has new conversations."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.01)
    start, mean = time.monotonic(), None
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps)
        rows = [encode(tokenizer, conversation(known, rng)) for _ in range(ROWS)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([own + [0] * (width - len(own)) for own, _ in rows])
        targets = torch.tensor([own + [IGNORED] * (width - len(own)) for _, own in rows])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: {mean:.3f} ({time.monotonic() - start:.0f} s)", flush=True)


def rate(step: int, steps: int) -> float:
    """The learning rate at `step`."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    share = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LAST + (PEAK - LAST) * 0.5 * (1 + math.cos(math.pi * share))


if __name__ == "__main__":
    main()
