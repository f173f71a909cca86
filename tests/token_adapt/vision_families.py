"""Small random checkpoints of every vision family, made by timm and transformers, and what these compute of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.token_adapt.timm_models import SMALL, randomise, vision_transformer, write_checkpoint

Tensor = torch.Tensor
# Normalised pixels [n, 3, side, side] -> logits, or the features of a checkpoint without classifier.
Reference = Callable[[Tensor], Tensor]

SIZE = 32
# Not those of any default, so that a default in place of them shows.
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.27)
_SIZES = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_TEXT = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LABELS = {"id2label": {index: f"kind {index}" for index in range(5)}}


@dataclass(frozen=True)
class Case:
    """A checkpoint of a family of `huggingface.FAMILIES`, or of timm.

    model      the class in transformers, or the architecture's name in timm
    config     its configuration
    read       the field of its output to compare with; "" for timm, which returns it
    """

    family: str
    variant: str
    model: str
    read: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def has_classifier(self) -> bool:
        return "Classification" in self.model or self.family == "timm"


CASES = (
    Case("timm", "ViT", "vit_small_patch8_32", ""),
    Case("timm", "mean of patches", "vit_small_patch8_32", "", {"global_pool": "avg"}),
    Case("timm", "distilled DeiT", "deit_small_distilled_patch8_32", ""),
    Case("timm", "CLIP", "vit_small_patch8_clip_quickgelu_32", "", {"pre_norm": True}),
    Case("timm", "SigLIP", "vit_base_patch32_siglip_32", "", {"class_token": False, "global_pool": "map"}),
    Case("timm", "DINOv2 giant", "vit_giant_patch8_dinov2", "", {"reg_tokens": 2, "init_values": 0.5}),
    Case("vit", "classifier", "ViTForImageClassification", "logits"),
    Case("vit", "features", "ViTModel", "last_hidden_state"),
    Case("deit", "classifier", "DeiTForImageClassification", "logits"),
    Case("deit", "distilled", "DeiTForImageClassificationWithTeacher", "logits"),
    Case("dinov2", "classifier", "Dinov2ForImageClassification", "logits"),
    Case("dinov2", "giant", "Dinov2ForImageClassification", "logits", {"use_swiglu_ffn": True}),
    Case("dinov2", "other size", "Dinov2Model", "pooler_output", {"image_size": 56}),
    Case("dinov2_with_registers", "classifier", "Dinov2WithRegistersForImageClassification", "logits"),
    Case("dinov2_with_registers", "other size", "Dinov2WithRegistersModel", "pooler_output", {"image_size": 56}),
    Case("dinov3_vit", "features", "DINOv3ViTModel", "pooler_output", {"num_register_tokens": 3}),
    Case("dinov3_vit", "gated", "DINOv3ViTModel", "pooler_output", {"use_gated_mlp": True, "hidden_act": "silu"}),
    Case("dinov3_vit", "other size", "DINOv3ViTModel", "pooler_output", {"image_size": 56}),
    Case("clip", "classifier", "CLIPForImageClassification", "logits"),
    Case("clip", "projection", "CLIPVisionModelWithProjection", "image_embeds"),
    Case("clip", "with text", "CLIPModel", "image_embeds"),
    Case("clip", "tower", "CLIPVisionModel", "pooler_output"),
    Case("siglip", "classifier", "SiglipForImageClassification", "logits"),
    Case("siglip", "with text", "SiglipModel", "image_embeds"),
    Case("siglip", "tower", "SiglipVisionModel", "pooler_output"),
)
# Read whole, to be pooled by tests.
OF_TOKENS = (
    Case("dinov2", "tokens", "Dinov2Model", "tokens"),
    Case("dinov2_with_registers", "tokens", "Dinov2WithRegistersModel", "tokens"),
    Case("dinov3_vit", "tokens", "DINOv3ViTModel", "tokens", {"num_register_tokens": 3}),
)


def write(case: Case, folder: Path) -> Reference:
    """Write the checkpoint into `folder`; returns the library's own computation."""
    return _write_timm(case, folder) if case.family == "timm" else _write_transformers(case, folder)


def _write_timm(case: Case, folder: Path) -> Reference:
    module = vision_transformer()
    layers = importlib.import_module("timm.layers")
    by_name: dict[str, dict[str, Any]] = {
        "clip_quickgelu": {"act_layer": "quick_gelu", "norm_layer": torch.nn.LayerNorm},
        "siglip": {"act_layer": "gelu_tanh"},
        "giant": {"mlp_layer": layers.SwiGLUPacked, "act_layer": torch.nn.SiLU, "no_embed_class": True},
    }
    extra = next((value for part, value in by_name.items() if part in case.model), {})
    made = module.VisionTransformer
    if "distilled" in case.model:
        made = importlib.import_module("timm.models.deit").VisionTransformerDistilled
    theirs = made(**SMALL, **case.config, **extra).eval()
    randomise(theirs)
    stated = {"global_pool": case.config["global_pool"]} if "global_pool" in case.config else {}
    write_checkpoint(folder, theirs.state_dict(), case.model, **stated)
    return lambda pixels: theirs(pixels)


def _write_transformers(case: Case, folder: Path) -> Reference:
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, case.model)(_config(case, transformers)).eval()
    randomise(theirs)
    theirs.save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))

    def run(pixels: Tensor) -> Tensor:
        if case.model in ("CLIPModel", "SiglipModel"):
            found = theirs.get_image_features(pixel_values=pixels)
            return getattr(found, "pooler_output", found)
        if case.read == "tokens":
            return theirs(pixel_values=pixels).last_hidden_state
        found = getattr(theirs(pixel_values=pixels), case.read)
        return found[:, 0] if case.read == "last_hidden_state" else found

    return run


def _config(case: Case, transformers: Any) -> Any:
    sizes = {**_SIZES, **case.config}
    labels = _LABELS if case.has_classifier else {}
    if case.family in ("clip", "siglip"):
        stem = "CLIP" if case.family == "clip" else "Siglip"
        vision = {**sizes, "projection_dim": 24} if case.family == "clip" else sizes
        if "VisionModel" in case.model:
            return getattr(transformers, f"{stem}VisionConfig")(**vision)
        return getattr(transformers, f"{stem}Config")(
            vision_config=vision, text_config=_TEXT, projection_dim=24, **labels
        )
    if case.family.startswith("dinov2"):
        del sizes["intermediate_size"]
        sizes |= {"mlp_ratio": 2}
    named = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters", "vit": "ViT", "deit": "DeiT"}
    named["dinov3_vit"] = "DINOv3ViT"
    return getattr(transformers, f"{named[case.family]}Config")(**sizes, **labels)
