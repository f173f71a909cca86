"""Make the demo checkpoint: `python checkpoints/docstrings-llama/train.py` (about half an hour on one core).

A tokenizer and a Llama of 3.7 million parameters, from the text of corpus.py. The same Python, torch and seed give the
same files.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from corpus import held_out, training
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
VOCABULARY, BOS, EOS = 4096, "<|bos|>", "<|eos|>"
LENGTH, ROWS, STEPS = 512, 2, 2600
PEAK, LAST, WARM_UP = 2e-3, 1e-4, 100
DECAY, CLIP, BETAS = 0.1, 1.0, (0.9, 0.95)


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
    documents = training()
    tokenizer = write_tokenizer(documents, options.to)
    stream, apart = pack(tokenizer, documents), pack(tokenizer, held_out())
    print(f"{len(documents)} documents, {sum(map(len, documents))} characters, {len(stream)} tokens", flush=True)
    model = LlamaForCausalLM(config())
    print(f"{model.num_parameters()} parameters", flush=True)
    train(model, stream, apart, options.steps)
    model.to(torch.bfloat16).save_pretrained(options.to)
    write_configs(options.to)
    stored = LlamaForCausalLM.from_pretrained(options.to, dtype=torch.float32)
    print(f"as stored: training text {loss_of(stored, stream[:40000]):.3f}, held out {loss_of(stored, apart):.3f}")


def config() -> LlamaConfig:
    """Four layers, grouped queries (8 heads, 2 of keys and values), tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
    )


def write_tokenizer(documents: list[str], folder: Path) -> Tokenizer:
    """A byte-level BPE tokenizer that puts BOS before a text; decoding restores any text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_configs(folder: Path) -> None:
    """Write the configuration files, also for releases of transformers before 5."""
    GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1).save_pretrained(folder)
    model_config = json.loads((folder / "config.json").read_text())
    model_config |= {"rope_theta": model_config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(model_config, indent=2) + "\n")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def pack(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents in sequence, int64 [tokens], each between BOS and EOS."""
    eos = tokenizer.token_to_id(EOS)
    return torch.tensor([token for made in tokenizer.encode_batch(documents) for token in [*made.ids, eos]])


def train(model: LlamaForCausalLM, stream: torch.Tensor, apart: torch.Tensor, steps: int) -> None:
    """Train by AdamW with a warm-up and a cosine; rows start at random places of the stream."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2]}, {"params": flat, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, weight_decay=DECAY)
    start, mean = time.monotonic(), None
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps)
        cuts = torch.randint(len(stream) - LENGTH - 1, (ROWS,))
        rows = torch.stack([stream[cut : cut + LENGTH + 1] for cut in cuts])
        loss = loss_on(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            loss_apart = f", held out {loss_of(model, apart):.3f}" if (step + 1) % 400 == 0 else ""
            print(f"step {step + 1}: {mean:.3f}{loss_apart} ({time.monotonic() - start:.0f} s)", flush=True)


def rate(step: int, steps: int) -> float:
    """The learning rate at `step`."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    share = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LAST + (PEAK - LAST) * 0.5 * (1 + math.cos(math.pi * share))


def loss_on(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, nats a token, of rows [n, length + 1]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Mean cross entropy, nats a token, over a stream cut into rows of `LENGTH`."""
    width = LENGTH + 1
    rows = stream[: len(stream) // width * width].view(-1, width)
    return float(sum(loss_on(model, part) * len(part) for part in rows.split(8)) / len(rows))


if __name__ == "__main__":
    main()
