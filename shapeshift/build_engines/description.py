"""What a model that was added will serve, in lines for its user; and the memory that it asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.build_engines import cascade, decode
from shapeshift.build_engines.decode import DecodeFrontConfig
from shapeshift.build_engines.image.plan import ImagePlan
from shapeshift.build_engines.repository import FrontConfig
from shapeshift.build_engines.text import front as text_front
from shapeshift.build_engines.text.plan import Plan, engine_outputs
from shapeshift.cascade import candidates
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines import capacity, device_plan, manifest
from shapeshift.engines.capacity import Ask
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.text.families import family_of, hidden_size, longest_text
from shapeshift.errors import InvalidInputError, listed
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.settings import FusedDecodeSettings, MemoryNeed
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.triton import model_config

_MOST_LISTED = 8


def describe(front: FrontConfig, checked: Any) -> tuple[list[str], Ask]:
    """The lines, and what the model asks for. checked: what `validate` found for it."""
    if isinstance(checked, Plan):
        return _text(checked)
    if isinstance(checked, ImagePlan):
        return _images(checked)
    if not isinstance(front, DecodeFrontConfig):
        # It holds no weights before its levels are built.
        return [], Ask(front.name, 0.0)
    if not isinstance(front.settings, FusedDecodeSettings):
        called = ", ".join(decode.forwards_to(front))
        return [f"serves: plain inference requests, one response each, which it forwards to {called}"], Ask(
            front.name, 0.0
        )
    return _decode(front, front.settings, checked)


def _text(planned: Plan) -> tuple[list[str], Ask]:
    config, params = planned.checkpoint.config, planned.front.settings
    modules, family = planned.modules, family_of(config)
    outputs = engine_outputs(planned, hidden_size(config))
    tensors = ", ".join(f"{name} {list(dims)}" for name, dims in outputs.items())
    adapters = ", with LoRA adapters (`shapeshift adapters add`)" if planned.front.adapters is not None else ""
    lines = [f"serves: {tensors} of a {family.name}, {planned.precision} ({planned.provider.name}){adapters}"]
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
    more = longest_text(config) > params.max_tokens
    further = f" (max_tokens; the model takes up to {longest_text(config)})" if more else ""
    lines.append(f"limits: texts of 1 to {params.max_tokens} tokens{pairs}{further}")
    return _with_memory(planned, lines)


def _images(planned: ImagePlan) -> tuple[list[str], Ask]:
    described, params = planned.described, planned.front.settings
    own_labels = f"{listed(described.classifier.labels, _MOST_LISTED)}; and " if described.classifier else ""
    side, gammas = described.architecture.image_size, ", ".join(map(str, planned.gammas))
    if later := [str(gamma) for gamma in params.gamma_list() if gamma not in planned.gammas]:
        gammas += f" (with tasks {', '.join(later)} too)"
    lines = [
        f"serves: vectors [{described.architecture.features}] and labels of images, {side} x {side} pixels, "
        f"{planned.precision} ({planned.provider.name}); gammas {gammas}",
        f"family: {described.family}",
        f"labels: {own_labels}those of its tasks; `shapeshift tasks train` and `register` make one",
    ]
    return _with_memory(planned, lines)


def _decode(front: DecodeFrontConfig, params: FusedDecodeSettings, checkpoint: Checkpoint) -> tuple[list[str], Ask]:
    model, need = Architecture.read(checkpoint.folder), decode.need(front, checkpoint)
    adapters = ", with LoRA adapters (`shapeshift adapters add`)" if front.adapters is not None else ""
    lines = [
        f"serves: generated text of a {model.family}, {model.layers} layers, {model.vocab_size} tokens{adapters}",
        f"limits: {params.max_concurrency} requests at once (max_concurrency), {params.max_length} tokens each, prompt "
        f"and answer together (max_length; the model takes up to {model.max_position})",
    ]
    lines.append(f"memory: {need.total_mb:.0f} MiB, {need.weights_mb:.0f} of them weights")
    if weights := decode.gguf_weights(checkpoint.folder, decode.precision_of(params, front, checkpoint)):
        lines.append(weights)
    if decode.gpu_of(front, checkpoint) is not None:
        # The plan of the GPU counts it.
        return lines, Ask(front.name, 0.0)
    return lines, _ask(front.name, need, checkpoint.sha256, decode.precision_of(params, front, checkpoint))


def _ask(name: str, need: MemoryNeed, checkpoint_sha256: str, precision: str) -> Ask:
    """Processes that serve one checkpoint alike map its weights."""
    params = need.params
    shared = checkpoint_sha256 and params.native and params.share_weights and params.tensor_parallel_size == 1
    key = f"{checkpoint_sha256}-{precision}-{params.group_size}" if shared else ""

    def refusal(left_mb: float) -> str:
        try:
            need.require(left_mb, "left for it")
        except InvalidInputError as error:
            return str(error)
        return ""

    return Ask(name, need.total_mb, key, need.weights_mb if shared else 0.0, refusal)


def published_ask(name: str, folder: Path, config: Any) -> Ask:
    """What the model with the generated `config` in `folder` asks for of the machine's memory.

    Raises ShapeshiftError, KeyError or ValueError for what cannot be served.
    """
    parameters = model_config.parameters(config)
    if config.backend in (decode.BACKEND, decode.WITH_ADAPTERS) and device_plan.PARAMETER in parameters:
        parts = json.loads(parameters[device_plan.PARAMETER])
        params = settings.read(FusedDecodeSettings, parameters)
        need = MemoryNeed(params, parts["engines"], parts["KV"], parts.get("adapters", 0.0))
        return _ask(name, need, parameters.get("checkpoint_sha256", ""), params.precision)
    limits = {text_front.BACKEND: PolymorphSettings.memory_mb, cascade.BACKEND: CascadeSettings.memory_mb}
    limit_mb = float(parameters.get("memory_mb", limits[config.backend])) if config.backend in limits else 0.0
    if config.backend == cascade.BACKEND and device_plan.PARAMETER not in parameters:
        chosen = candidates.serving(folder / parameters["candidates_dir"], parameters["task"])
        engines = f"{parameters['engines_dir']}/{chosen.candidate.levels[0]}"
        built = manifest.load(folder / engines)
        parameters |= {"engines": engines, "precision": built.precision, "provider": built.provider}
    return capacity.ask_of(name, folder, parameters, limit_mb)


def _with_memory(planned: Plan | ImagePlan, lines: Sequence[str]) -> tuple[list[str], Ask]:
    parameters, parts = {"checkpoint": ".", "precision": planned.precision}, "the weights"
    if isinstance(planned, Plan) and planned.front.adapters is not None:
        parameters |= {"adapter_mb": str(planned.front.adapters.adapter_mb)}
        parts += " and adapter_mb"
    ask = capacity.ask_of(planned.front.name, planned.checkpoint.folder, parameters)
    # What runs on a GPU is counted by the plan of the GPU.
    counted = ask if planned.device is None else Ask(planned.front.name, 0.0)
    return [*lines, f"memory: at least {ask.memory_mb:.0f} MiB, {parts}"], counted
