"""A small base model, adapters over it in PEFT's format, and the results of PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
EVERYWHERE = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PREFIX = "base_model.model.model.layers"


@dataclass(frozen=True)
class Spec:
    """An adapter to make; layers: None for all."""

    rank: int
    targets: tuple[str, ...] = EVERYWHERE
    layers: tuple[int, ...] | None = None
    rslora: bool = False
    alpha: float | None = None
    dora: bool = False


MIXED = {
    "small": Spec(2),
    "attention": Spec(8, ATTENTION),
    "queries": Spec(16, ("self_attn.q_proj", "self_attn.v_proj"), rslora=True),
    "mlp": Spec(5, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), alpha=3.0),
    "one_layer": Spec(33, layers=(1,)),
    "large": Spec(64),
}
"""Various ranks and targets, with ranks that are multiples of nothing among them."""


def make_adapter(folder: Path, base: Path, spec: Spec, seed: int = 0, **config: Any) -> Path:
    """A PEFT folder of random weights that change the model's output; `config` overrides its configuration."""
    import torch

    from shapeshift.adapter_cache.lora.batch import linear_parts, targets
    from shapeshift.fused_decode.model.architecture import Architecture

    architecture = Architecture.read(base)
    parts, places = linear_parts(architecture), targets(architecture)
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(architecture.layers) if spec.layers is None else spec.layers:
        for target in spec.targets:
            part = parts[places[target]]
            name = f"{_PREFIX}.{layer}.{target}.lora"
            spread = 1 / math.sqrt(part.inputs)
            tensors[f"{name}_A.weight"] = torch.randn(spec.rank, part.inputs, generator=chance) * spread
            tensors[f"{name}_B.weight"] = torch.randn(part.outputs, spec.rank, generator=chance) * 0.3
            if spec.dora:
                tensors[f"{name}_magnitude_vector"] = torch.rand(part.outputs, generator=chance) + 1.5
    return save_adapter(folder, base, spec, tensors, **config)


def save_adapter(folder: Path, base: Path, spec: Spec, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """These tensors as a PEFT folder."""
    from safetensors.torch import save_file

    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": spec.rank,
        "lora_alpha": spec.alpha or 2 * spec.rank,
        "target_modules": sorted({target.split(".")[1] for target in spec.targets}),
        "layers_to_transform": None if spec.layers is None else list(spec.layers),
        "use_rslora": spec.rslora,
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0,
        "use_dora": spec.dora,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**stated, **config}))
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def written_by_peft(folder: Path, base: Path, dora: bool = False, rank: int = 4) -> Path:
    """An adapter of every linear, as PEFT names, shapes and saves it, with random weights."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    torch.manual_seed(rank + dora)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "lora_magnitude" in name:
            torch.nn.init.uniform_(parameter, 1.5, 2.5)
    model.save_pretrained(folder)
    return folder


def peft_logits(
    base: Path, adapters: Mapping[str, Path], texts: Sequence[tuple[str | None, torch.Tensor]]
) -> list[Any]:
    """PEFT's logits of each text alone, with its adapter or None: FLOAT32 [tokens, vocab_size] each."""
    import torch
    import transformers
    from peft import PeftModel

    def plain() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    made = []
    for name, tokens in texts:
        model = plain()
        if name is not None:
            model = PeftModel.from_pretrained(model, adapters[name]).eval()
        with torch.inference_mode():
            made.append(model(tokens[None]).logits[0])
    return made


def peft_texts(
    base: Path, adapters: Mapping[str, Path], prompt: str, count: int, num_beams: int = 1
) -> dict[str | None, str]:
    """PEFT's greedy answers to a prompt, or those of beam search: without an adapter (None), and with each."""
    import torch
    import transformers
    from peft import PeftModel
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    made: dict[str | None, str] = {}
    for name in (None, *adapters):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        if name is not None:
            model = PeftModel.from_pretrained(model, adapters[name]).eval()
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=ids, max_new_tokens=count, do_sample=False, num_beams=num_beams, pad_token_id=1
            )
        made[name] = str(tokenizer.decode(tokens[0, ids.shape[1] :].tolist()))
    return made
