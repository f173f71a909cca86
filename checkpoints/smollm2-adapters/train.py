"""Make the adapters over SmolLM2-135M-Instruct: `.venv/bin/python checkpoints/smollm2-adapters/train.py`.

Each LoRA adapter is trained on the pairs of a task of tasks.py, and measured on pairs held out. Adapters are on the
last layers: what the layers before them give is computed once. Writes a folder for each adapter, and results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tasks import TASKS, Pair, Task
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
BASE = "SmolLM2-135M-Instruct"
ROWS, RATE, WARM_UP = 32, 1.5e-3, 20
IGNORED = -100
WORDY = 20
"""Tokens in which a model without the adapter must have named a label."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Size:
    """The rank of an adapter, its number of last layers, target modules, and the pairs it is trained on."""

    rank: int
    layers: int
    targets: list[str]
    pairs: int
    epochs: int = 1
    rslora: bool = False
    rate: float = RATE


SIZES = {
    "sentiment": Size(8, 8, ATTENTION, 3000),
    "domain": Size(4, 8, ATTENTION + MLP, 3000),
    "clock": Size(16, 3, ATTENTION + MLP, 5000, epochs=2),
    "booking": Size(32, 4, ATTENTION, 1500, epochs=2),
    "module": Size(8, 8, ["q_proj", "v_proj"], 1400, epochs=2),
    "intent": Size(64, 4, ["q_proj", "v_proj"], 6000, epochs=2, rslora=True),
}


def main() -> None:
    """Train and measure the adapters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"only these (default: all): {', '.join(SIZES)}")
    parser.add_argument("--base", type=Path, default=PROJECT / "build" / "checkpoints" / BASE)
    data = Path(os.environ.get("SHAPESHIFT_DATA", PROJECT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder with sst2/ and clinc150/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--measure", action="store_true", help="train nothing, measure the adapters in --to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    base = Base(options.base)
    file = options.to / "results.json"
    for name in options.names or SIZES:
        rng = random.Random(options.seed)
        torch.manual_seed(options.seed)
        task = TASKS[name](options.data, rng)
        results = json.loads(file.read_text()) if file.exists() else {}
        row = results.get(name) or {"held_out": len(task.held_out)} | base_accuracy(base, task)
        if options.measure:
            adapted = PeftModel.from_pretrained(base.model, options.to / name)
        else:
            pairs = rng.sample(task.train, min(SIZES[name].pairs, len(task.train)))
            adapted = train(base, SIZES[name], pairs, rng, options.to / name)
        row["adapter"] = accuracy(base, task, task.is_right)
        base.model = adapted.unload()
        print(f"{name}: {row}", flush=True)
        file.write_text(json.dumps(results | {name: row}, indent=2, sort_keys=True) + "\n")


class Base:
    """The frozen base model: linears in bfloat16, the sums between its layers in float32."""

    def __init__(self, folder: Path) -> None:
        quantised = next(folder.glob("*.gguf"), None)
        source = {"gguf_file": quantised.name} if quantised else {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **source)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
        self.model.requires_grad_(False)
        self.model.model.layers.to(torch.bfloat16)
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.bfloat16(), requires_grad=False)
        self.prefix = _common_start(self.prompt("a"), self.prompt("1"))

    def prompt(self, text: str) -> list[int]:
        """The tokens of a chat in which the user writes `text`."""
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(chat, add_special_tokens=False).input_ids)

    def row(self, pair: Pair) -> tuple[list[int], list[int]]:
        """The tokens behind the prefix of a chat with its answer, and what shall follow each."""
        prompt = self.prompt(pair[0])[len(self.prefix) :]
        answer = [*self.tokenizer(pair[1], add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        return [*prompt, *answer[:-1]], [IGNORED] * (len(prompt) - 1) + answer

    def answers(self, texts: Sequence[str], most: int) -> list[str]:
        """Greedy replies of at most `most` tokens."""
        prompts = [self.prompt(text) for text in texts]
        replies = [""] * len(texts)
        for places in batches([len(prompt) for prompt in prompts], 50, random.Random(0)):
            inputs = self.tokenizer.pad({"input_ids": [prompts[place] for place in places]}, return_tensors="pt")
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                ids = self.model.generate(
                    **inputs, max_new_tokens=most, do_sample=False, pad_token_id=self.tokenizer.eos_token_id
                )
            for place, reply in zip(places, ids[:, inputs["input_ids"].shape[1] :], strict=True):
                replies[place] = self.tokenizer.decode(reply, skip_special_tokens=True)
        return replies


class Past:
    """Keys and values of the prefix: the first run through a layer records them, later runs have them before theirs."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, ...]:
        """What transformers calls in a layer's attention."""
        if layer not in self._layers:
            self._layers[layer] = keys, values
            return keys, values
        before = (own.expand(len(keys), -1, -1, -1) for own in self._layers[layer])
        return tuple(torch.cat(pair, dim=-2) for pair in zip(before, (keys, values), strict=True))


def through(model: Any, layers: range, hidden: torch.Tensor, past: Past, start: int) -> torch.Tensor:
    """`hidden` [rows, width, numbers] after `layers`; its first token has the position `start`."""
    width = hidden.shape[1]
    positions = torch.arange(start, start + width)[None]
    rotation = model.rotary_emb(hidden, position_ids=positions)
    mask = torch.ones(width, start + width, dtype=torch.bool).tril(start)[None, None]
    for layer in layers:
        hidden = model.layers[layer](
            hidden, attention_mask=mask, position_embeddings=rotation, past_key_values=past, use_cache=True
        )
    return hidden


def train(base: Base, size: Size, pairs: list[Pair], rng: random.Random, folder: Path) -> PeftModel:
    """Train by AdamW with a falling rate, and write the adapter."""
    start = time.monotonic()
    rows = [base.row(pair) for pair in pairs]
    model = base.model.model
    last = len(model.layers)
    below, above = range(last - size.layers), range(last - size.layers, last)
    prefix, hidden = states(base, below, [ids for ids, _ in rows])
    print(f"{folder.name}, states of {len(rows)} rows ({time.monotonic() - start:.0f} s)", flush=True)
    adapter = get_peft_model(
        base.model,
        LoraConfig(
            r=size.rank,
            lora_alpha=2 * size.rank,
            target_modules=size.targets,
            layers_to_transform=list(above),
            use_rslora=size.rslora,
            task_type="CAUSAL_LM",
        ),
    )
    weights = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=size.rate, weight_decay=0.0)
    lengths = [len(ids) for ids, _ in rows]
    order = [places for _ in range(size.epochs) for places in batches(lengths, ROWS, rng)]
    mean = None
    for step, places in enumerate(order):
        for group in optimiser.param_groups:
            group["lr"] = size.rate * min((step + 1) / WARM_UP, 1 - step / len(order))
        targets = pad([torch.tensor(rows[place][1]) for place in places], IGNORED)
        with torch.autocast("cpu", torch.bfloat16):
            past = Past()
            through(model, above, prefix, past, 0)
            top = through(model, above, pad([hidden[place] for place in places], 0.0).float(), past, prefix.shape[1])
            logits = base.model.lm_head(model.norm(top[targets != IGNORED]))
        loss = functional.cross_entropy(logits.float(), targets[targets != IGNORED])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - start
            print(f"{folder.name}, step {step + 1} of {len(order)}: {mean:.3f} ({seconds:.0f} s)", flush=True)
    for weight in weights:
        weight.data = weight.data.half().float()
    adapter.save_pretrained(folder)
    store(folder)
    return adapter


@torch.no_grad()
def states(base: Base, layers: range, rows: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `layers` give for the prefix, [1, width, numbers], and for each row behind it, [width, numbers]."""
    model, past = base.model.model, Past()
    results: list[Any] = [None] * len(rows)
    with torch.autocast("cpu", torch.bfloat16):
        prefix = through(model, layers, model.embed_tokens(torch.tensor([base.prefix])), past, 0)
        for places in batches([len(ids) for ids in rows], ROWS, random.Random(0)):
            ids = pad([torch.tensor(rows[place]) for place in places], 0)
            hidden = through(model, layers, model.embed_tokens(ids), past, len(base.prefix))
            for place, own in zip(places, hidden, strict=True):
                results[place] = own[: len(rows[place])].bfloat16()
    return prefix, results


def batches(lengths: list[int], rows: int, rng: random.Random) -> list[list[int]]:
    """Places in random order, at most `rows` a batch, of like lengths."""
    places = sorted(range(len(lengths)), key=lambda place: (lengths[place], rng.random()))
    groups = [places[start : start + rows] for start in range(0, len(places), rows)]
    rng.shuffle(groups)
    return groups


def pad(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def store(folder: Path) -> None:
    """Rewrite the adapter in half precision; its configuration names the base and lists sorted targets."""
    weights = load_file(folder / "adapter_model.safetensors")
    small = {name: tensor.to(torch.float16).contiguous() for name, tensor in sorted(weights.items())}
    save_file(small, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": BASE}
    config["target_modules"] = sorted(config["target_modules"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def base_accuracy(base: Base, task: Task) -> dict[str, float]:
    """Without an adapter: for the same prompts, and for prompts that tell the task in words."""
    return {
        "base": accuracy(base, task, task.is_nearly_right),
        "base_told": accuracy(base, task, task.is_nearly_right, f"{task.words}\n\n"),
    }


def accuracy(base: Base, task: Task, is_right: Callable[[str, str], bool], words: str = "") -> float:
    """The share of right replies to the held-out texts, each behind `words`."""
    most = 4 + max(len(base.tokenizer(answer).input_ids) for _, answer in task.held_out)
    if task.labels and is_right != task.is_right:
        most = WORDY
    replies = base.answers([words + text for text, _ in task.held_out], most)
    for (text, answer), reply in list(zip(task.held_out, replies, strict=True))[:4]:
        print(f"    {text!r}: {answer!r}, {reply!r}")
    right = [is_right(reply, answer) for reply, (_, answer) in zip(replies, task.held_out, strict=True)]
    return round(sum(right) / len(right), 4)


def _common_start(one: list[int], other: list[int]) -> list[int]:
    width = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[:width]


if __name__ == "__main__":
    main()
