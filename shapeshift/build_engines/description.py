"""What a model that was added will serve, in lines for its user; and the memory that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shapeshift.build_engines import decode
from shapeshift.build_engines.decode import DecodeFrontConfig
from shapeshift.build_engines.image.plan import ImagePlan
from shapeshift.build_engines.new_model import decode_bytes
from shapeshift.build_engines.repository import FrontConfig
from shapeshift.build_engines.text.plan import Plan, engine_outputs
from shapeshift.engines import capacity
from shapeshift.engines.capacity import Ask
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.text.families import family_of, hidden_size, longest_text
from shapeshift.errors import listed
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.settings import FusedDecodeSettings

_MIB = 2**20
_MOST_LISTED = 8


def describe(front: FrontConfig, checked: Any) -> tuple[list[str], Ask]:
    """The lines, and what the model asks for. checked: what `validate` found for it."""
    if isinstance(checked, Plan):
        return _text(checked)
    if isinstance(checked, ImagePlan):
        return _images(checked)
    assert isinstance(front, DecodeFrontConfig)
    if not isinstance(front.settings, FusedDecodeSettings):
        called = ", ".join(decode.forwards_to(front))
        return [f"serves: plain inference requests, one response each, which it forwards to {called}"], Ask(
            front.name, 0.0
        )
    return _decode(front.name, front.settings, checked, front.adapters is not None)


def _text(planned: Plan) -> tuple[list[str], Ask]:
    config, own = planned.checkpoint.config, planned.front.settings
    modules, family = planned.modules, family_of(config)
    outputs = engine_outputs(planned, hidden_size(config))
    tensors = ", ".join(f"{name} {list(dims)}" for name, dims in outputs.items())
    lines = [f"serves: {tensors} of a {family.name}, {planned.precision} ({planned.provider.name})"]
    if "EMBEDDING" in outputs:
        scaled = "scaled to length 1" if modules.normalize else "not scaled"
        lines.append(f"pooling: {', '.join(modules.pooling)}; vectors are {scaled}")
        if modules.prompts:
            default = f"; without prompt_name: {modules.default_prompt}" if modules.default_prompt else ""
            lines.append(f"prompts: {listed(list(modules.prompts), _MOST_LISTED)}{default}")
    if planned.labels:
        scores = f"; scores: {planned.activation} of LOGITS" if planned.activation else ""
        lines.append(f"labels: {listed(planned.labels, _MOST_LISTED)}{scores}")
    pairs = ", or pairs of them" if planned.pairs else ""
    more = longest_text(config) > own.max_tokens
    further = f" (max_tokens; the model takes up to {longest_text(config)})" if more else ""
    lines.append(f"limits: texts of 1 to {own.max_tokens} tokens{pairs}{further}")
    return _with_memory(planned, lines)


def _images(planned: ImagePlan) -> tuple[list[str], Ask]:
    made, own = planned.described, planned.front.settings
    own_labels = f"{listed(made.classifier.labels, _MOST_LISTED)}; and " if made.classifier else ""
    side, gammas = made.architecture.image_size, ", ".join(map(str, own.gamma_list()))
    lines = [
        f"serves: labels of images, {side} x {side} pixels, {planned.precision} ({planned.provider.name}); "
        f"gammas {gammas}",
        f"family: {made.family}",
        f"labels: {own_labels}those of its tasks; `shapeshift tasks train` and `register` make one",
    ]
    return _with_memory(planned, lines)


def _decode(name: str, own: FusedDecodeSettings, checkpoint: Checkpoint, lora: bool) -> tuple[list[str], Ask]:
    made = Architecture.read(checkpoint.folder)
    weights, slot = decode_bytes(made, own.max_length)
    texts = own.kv_cache_tokens / own.max_length or own.max_concurrency
    adapters = ", with LoRA adapters (`shapeshift adapters add`)" if lora else ""
    lines = [
        f"serves: generated text of a {made.family}, {made.layers} layers, {made.vocab_size} tokens{adapters}",
        f"limits: {own.max_concurrency} requests at once (max_concurrency), {own.max_length} tokens each, prompt and "
        f"answer together (max_length; the model takes up to {made.max_position})",
    ]
    bound = (weights + texts * slot) / _MIB
    lines.append(f"memory: {bound:.0f} MiB, {weights / _MIB:.0f} of them weights")
    return lines, Ask(name, bound)


def _with_memory(planned: Plan | ImagePlan, lines: Sequence[str]) -> tuple[list[str], Ask]:
    parameters = {"checkpoint": ".", "precision": planned.precision}
    ask = capacity.ask_of(planned.front.name, planned.checkpoint.folder, parameters)
    return [*lines, f"memory: at least {ask.memory_mb:.0f} MiB, the weights"], ask
