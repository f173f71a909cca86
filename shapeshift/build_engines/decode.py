"""Fronts of the backends fused_decode and adapter_cache: their checkpoint is served as it is; kernels are compiled."""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shapeshift import settings
from shapeshift.adapter_cache.settings import AdapterCacheSettings, require_one_rank
from shapeshift.build_engines import adapters
from shapeshift.build_engines.decoding import perplexity, reference
from shapeshift.build_engines.hub.sources import base_names, find_checkpoint
from shapeshift.build_engines.model_folder import CONFIG, VERSION, gpus_of, is_placed, write_front
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import device_plan
from shapeshift.engines.checkpoint import Checkpoint, open_checkpoint
from shapeshift.engines.gguf import families, tensors
from shapeshift.engines.text import chat_template_files, tokenizer_files
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.files import HASHES
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.settings import (
    COMPUTED_BYTES,
    HEAD_BITS,
    QUANTISED,
    WEIGHT_BITS,
    ForwardSettings,
    FusedDecodeSettings,
    MemoryNeed,
    computed,
    require_kv_precision,
    resolve,
    signature,
)
from shapeshift.progress import ProgressCallback
from shapeshift.triton import model_config

BACKEND, WITH_ADAPTERS = "fused_decode", "adapter_cache"
PERPLEXITIES = "perplexities.json"
"""The file of the build folder that remembers what was measured."""
COMPARED = "compared_with_transformers"
"""The file of the build folder that remembers the checkpoints whose logits are right."""


@dataclass(frozen=True)
class DecodeFrontConfig:
    """A folder of the model repository whose model generates text, or forwards to one that does.

    adapters: the settings of the adapter cache; None for a model without adapters.
    """

    name: str
    folder: Path
    config: Any
    settings: FusedDecodeSettings | ForwardSettings
    adapters: AdapterCacheSettings | None = None


def read(folder: Path, config: Any, values: Mapping[str, str]) -> DecodeFrontConfig:
    """The front in `folder`. Raises InvalidInputError naming the field."""
    kind: type[ForwardSettings | FusedDecodeSettings] = (
        ForwardSettings if "forward_to" in values else FusedDecodeSettings
    )
    completed = model_config.complete(config, signature(values))
    of_adapters = settings.names(AdapterCacheSettings)
    if config.backend == BACKEND or kind is ForwardSettings:
        unfit = {f'goes with backend "{WITH_ADAPTERS}" only': of_adapters}
        if kind is ForwardSettings:
            of_generator = of_adapters | settings.names(FusedDecodeSettings)
            unfit = {f"does not go with forward_to: set it in {values['forward_to']}, which generates": of_generator}
        settings.refuse_unknown(values, settings.names(kind), unfit)
        return DecodeFrontConfig(folder.name, folder, completed, settings.read(kind, values))
    settings.refuse_unknown(values, settings.names(kind) | of_adapters)
    decoding, adapter_cache = settings.read(FusedDecodeSettings, values), settings.read(AdapterCacheSettings, values)
    require_one_rank(decoding)
    return DecodeFrontConfig(folder.name, folder, completed, decoding, adapter_cache)


def forwards_to(front: DecodeFrontConfig) -> tuple[str, ...]:
    """The model that a forwarding front calls; empty for a model that generates."""
    return (front.settings.forward_to,) if isinstance(front.settings, ForwardSettings) else ()


class _Checked(NamedTuple):
    """A checkpoint that can be loaded, and its tokenizer: contents of files by path in the model's folder.

    library: transformers' tokenizer; None where the model's folder is that of this checkpoint already.
    """

    checkpoint: Checkpoint
    tokenizer: Mapping[str, str]
    library: Any


def check(front: DecodeFrontConfig, paths: BuildPaths) -> Checkpoint | None:
    """The checkpoint; None for a front that forwards. Raises the error of one that cannot be loaded."""
    if isinstance(front.settings, ForwardSettings):
        if not (paths.repository / front.settings.forward_to / CONFIG).is_file():
            raise NotFoundError(f"forward_to: no model {front.settings.forward_to} in {paths.repository}")
        return None
    return _checked(front, front.settings, paths).checkpoint


def _checked(front: DecodeFrontConfig, params: FusedDecodeSettings, paths: BuildPaths) -> _Checked:
    source = find_checkpoint(params.checkpoint, paths)
    checkpoint = open_checkpoint(source.folder, origin=source.origin, hashes=paths.build / HASHES)
    precision = precision_of(params, front, checkpoint)
    require_kv_precision(params.kv_precision, gpu_of(front, checkpoint) is not None)
    perplexity.text_of(checkpoint, replace(params, precision=precision))
    if params.tensor_parallel_size > 1:
        allowed = f"one of {', '.join(COMPUTED_BYTES)} with tensor_parallel_size above 1"
        settings.require(precision in COMPUTED_BYTES, "precision", precision, allowed)
        Architecture.read(checkpoint.folder).share(params.tensor_parallel_size)
    published = _published(paths.generated / front.name, checkpoint)
    if published:
        return _Checked(checkpoint, published, None)
    return _Checked(checkpoint, *_require_loadable(checkpoint, params, front.adapters))


def publish(front: DecodeFrontConfig, paths: BuildPaths, progress: ProgressCallback) -> str:
    """Check the checkpoint, compile the kernels and write the model's folder. Returns a summary line."""
    target = paths.generated / front.name
    params = front.settings
    if isinstance(params, ForwardSettings):
        check(front, paths)
        summary = f"forwards to {params.forward_to}"
        write_front(front.folder, front.config, target, {}, summary)
        return summary
    checkpoint, tokenizer, library = _checked(front, params, paths)
    kernels = paths.build / "kernels"
    lora = front.adapters is not None
    state = "up to date"
    if library is not None:
        state = _compile(params.native, kernels, lora, progress)
        state += f", {reference.require_logits(checkpoint, library, params.native, paths.build / COMPARED, kernels)}"
    parameters = {
        "checkpoint": paths.portable(checkpoint.folder, target),
        "checkpoint_sha256": checkpoint.sha256,
        "checkpoint_origin": checkpoint.origin,
        "checkpoint_name": params.checkpoint,
        "tokenizer_key": tokenizer_files.key(checkpoint),
        "precision": precision_of(params, front, checkpoint),
        "kernel_cache": paths.portable(kernels, target),
    }
    device = gpu_of(front, checkpoint)
    where = "" if device is None else f", GPU {device}"
    summary = f"checkpoint: {checkpoint.origin or params.checkpoint}, {parameters['precision']}{where}"
    if device is not None:
        # It imports torch.
        from shapeshift.fused_decode.model.graphs.device_memory import of_decode

        adapter_mb = front.adapters.adapter_mb if front.adapters else 0
        parameters |= of_decode(Architecture.read(checkpoint.folder), params, parameters["precision"], adapter_mb)
    else:
        parameters |= device_plan.as_parameter(need(front, checkpoint).parts())
    extra_files = dict(tokenizer)
    together = f", {params.kv_cache_tokens} together" if params.kv_cache_tokens else ""
    capacity = f"{params.max_concurrency} slots of {params.max_length} tokens{together}"
    params = replace(params, precision=parameters["precision"])
    if (text := perplexity.text_of(checkpoint, params)) is not None:
        result = perplexity.measured(checkpoint, params, text, paths.build / PERPLEXITIES, kernels)
        summary += f", {result.line(params, text)}"
    # At the end: a build that fails moves no registry.
    if front.adapters is not None:
        # It imports torch.
        from shapeshift.adapter_cache.registry.peft import BaseModel

        version, folder = front.folder / "1", checkpoint.folder
        names = base_names(params.checkpoint, folder, front.adapters.base_names)
        base = BaseModel.of_decoder(
            Architecture.read(folder), names, front.adapters.max_rank, folder, checkpoint.sha256
        )
        parameters |= adapters.parameters(front.name, front.adapters, base, target, paths)
        extra_files |= adapters.multi_lora_files(version)
        capacity += f", {adapters.prepare(front.name, front.adapters, base, version, paths)}"
    write_front(front.folder, front.config, target, parameters, summary, extra_files, device)
    weights = gguf_weights(checkpoint.folder, parameters["precision"])
    return f"{state}; {summary}, {capacity}" + (f"\n  {weights}" if weights else "")


def gguf_weights(folder: Path, precision: str) -> str:
    """How many tensors of the GGUF file are held as they are, and what the others become; empty for safetensors."""
    entries = tensors.read_index(folder)
    stays = precision in QUANTISED and families.bits_of(entries) == WEIGHT_BITS[precision]
    head = next((name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in entries), "")
    counts: dict[str, Counter[str]] = {}
    for name, entry in entries.items():
        held = computed(precision)
        if families.is_linear(name):
            held = entry.kind if stays else precision
        elif name == head and precision in QUANTISED:
            held = entry.kind if tensors.LEVELS.get(entry.kind) == HEAD_BITS else f"int{HEAD_BITS}"
        becomes = "as they are" if held.lower() == entry.kind.lower() else f"become {held}"
        counts.setdefault(becomes, Counter())[entry.kind] += 1
    parts = [
        f"{', '.join(f'{count} {kind}' for kind, count in of.most_common())} {becomes}"
        for becomes, of in sorted(counts.items())
    ]
    return f"tensors of the file: {'; '.join(parts)}" if parts else ""


def need(front: DecodeFrontConfig, checkpoint: Checkpoint) -> MemoryNeed:
    """The memory that a front with a checkpoint takes when it is loaded."""
    # It imports torch.
    from shapeshift.fused_decode.loading import need_of

    params = front.settings
    assert isinstance(params, FusedDecodeSettings), "a front that forwards allocates nothing"
    adapter_bytes = front.adapters.adapter_mb << 20 if front.adapters else 0
    return need_of(Architecture.read(checkpoint.folder), params, precision_of(params, front, checkpoint), adapter_bytes)


def precision_of(params: FusedDecodeSettings, front: DecodeFrontConfig, checkpoint: Checkpoint) -> str:
    """The precision that `auto` stands for. Raises InvalidInputError for a checkpoint that is quantised otherwise."""
    return resolve(params.precision, gpu_of(front, checkpoint), from_config(checkpoint.config).packed_bits)


def gpu_of(front: DecodeFrontConfig, checkpoint: Checkpoint) -> int | None:
    """The number of the GPU that serves a front with a checkpoint, None for the CPU.

    Where its config.pbtxt states no instance_group, that is the first one, unless its parameters or the quantised
    weights of its checkpoint are for CPUs.
    """
    params = front.settings
    assert isinstance(params, FusedDecodeSettings), "a front that forwards computes nothing"
    device = next(iter(gpus_of(front.folder)), None)
    if device is None or is_placed(front.folder):
        return device
    quantised = params.precision == "auto" and from_config(checkpoint.config).packed_bits > 0
    for_cpus = params.precision in QUANTISED or params.kv_precision != "auto" or params.tensor_parallel_size > 1
    return None if quantised or for_cpus else device


def _published(target: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """The files of the tokenizer in the published folder `target`; none unless it was made of this checkpoint."""
    made_of = {"checkpoint_sha256": checkpoint.sha256, "tokenizer_key": tokenizer_files.key(checkpoint)}
    try:
        parameters = model_config.parameters(model_config.read(target / CONFIG))
        return _tokenizer_of(target / VERSION) if made_of.items() <= parameters.items() else {}
    except (ShapeshiftError, OSError):
        return {}


def _tokenizer_of(folder: Path) -> dict[str, str]:
    return {f"{VERSION}/{name}": (folder / name).read_text(encoding="utf-8") for name in tokenizer_files.PUBLISHED}


def _require_loadable(
    checkpoint: Checkpoint, params: FusedDecodeSettings, adapter_cache: AdapterCacheSettings | None
) -> tuple[dict[str, str], Any]:
    """Raise the error with which the model would fail to load; else return the files of its tokenizer, and the
    tokenizer of transformers.

    adapter_cache: None for a model without adapters.
    """
    # These import torch, which no other step of the build needs.
    from shapeshift.adapter_cache.lora.batch import require_plain_layers
    from shapeshift.fused_decode.engine.detokenize import require_texts, require_tokens_of_model, token_bytes
    from shapeshift.fused_decode.model.weights import WeightFiles

    architecture = Architecture.read(checkpoint.folder)
    WeightFiles(checkpoint.folder, architecture)
    if adapter_cache is not None:
        require_plain_layers(architecture)
    file = checkpoint.tokenizer_file
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Before transformers reads it, for an error that names the file.
        count = tokenizer_files.highest_id(file) + 1 if file.is_file() else None
        library = tokenizer_files.write(checkpoint.folder, folder)
        # Tokens beside a tokenizer.json may have ids that the model lacks: prompts with one are refused.
        table = token_bytes(folder / TOKENIZER_FILE)
        require_tokens_of_model(table[:count], architecture.vocab_size, params.extra_tokens)
        require_texts(folder / TOKENIZER_FILE, table)
        reference.require_rendering(library, chat_template_files.read(folder), checkpoint.folder)
        return _tokenizer_of(folder), library


def _compile(native: bool, kernels: Path, lora: bool, progress: ProgressCallback) -> str:
    """Compile the kernels of a checkpoint that was checked. Returns what was done."""
    # These import torch.
    from shapeshift.adapter_cache.lora import native as native_terms
    from shapeshift.fused_decode.model import native_operations

    if not native:
        return "checked"
    try:
        native_operations.library(kernels, progress)
        if lora:
            native_terms.library(kernels, progress)
    except (OSError, subprocess.SubprocessError) as error:
        return f"checked, without compiled kernels ({error})"
    return "checked, kernels compiled"
