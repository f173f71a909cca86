"""From a model's parameters to its checkpoint, tokenizer and runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shapeshift import settings
from shapeshift.engines import precision
from shapeshift.engines.checkpoint import find, open_checkpoint
from shapeshift.engines.hardware import available_mb, cores
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.tokenizer import TextTokenizer
from shapeshift.errors import EngineError, UnsupportedError
from shapeshift.fused_decode.architecture import PRECISION_BYTES, Architecture
from shapeshift.fused_decode.cache import cache_bytes
from shapeshift.fused_decode.detokenize import token_bytes
from shapeshift.fused_decode.memory import require_memory
from shapeshift.fused_decode.model import DecodeModel
from shapeshift.fused_decode.settings import FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.fused_decode.step import Runtime
from shapeshift.fused_decode.weights import weight_bytes
from shapeshift.serving.log import Log
from shapeshift.serving.model_args import ModelArgs

_DEFAULT_CACHE = Path.home() / ".cache" / "shapeshift"
Load = Callable[[Path, FusedDecodeSettings, Path, str, Log], Runtime]


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate: its settings, the way from text to tokens and back, its folder and its kernels'."""

    own: FusedDecodeSettings
    runtime: Runtime
    tokenizer: TextTokenizer
    table: Sequence[bytes]
    folder: Path
    kernels: Path


def load_runtime(
    folder: Path, own: FusedDecodeSettings, kernels: Path, device: str, log: Log, beside: int = 0
) -> DecodeModel:
    """The model in a checkpoint folder on `device` (cpu or cuda:0), once its memory bound is known to fit.

    beside: bytes of memory after the last slot, for other uses.
    """
    on_gpu = device != "cpu"
    stated = precision.resolve(own.precision, on_gpu)
    architecture = Architecture.read(folder)
    slot = cache_bytes(architecture, 1, own.max_length, stated)
    weights = weight_bytes(architecture, stated)
    available = _free_mb(device) if on_gpu else available_mb()
    require_memory(weights + beside, slot, own.max_concurrency, own.max_length, own.memory_mb, available, log)
    extra = beside // PRECISION_BYTES[stated]
    if on_gpu:
        from shapeshift.fused_decode.graphs import GraphedModel

        log(f"{architecture.family}, {stated}, {device}")
        return GraphedModel.load_on(
            device, folder, precision=stated, slots=own.max_concurrency, max_length=own.max_length, beside=extra
        )
    threads = own.threads or cores()
    model = DecodeModel.load(
        folder,
        precision=stated,
        slots=own.max_concurrency,
        max_length=own.max_length,
        threads=threads,
        native=own.native,
        cache_dir=kernels,
        log=log,
        beside=extra,
    )
    log(f"{architecture.family}, {stated}, {model.operations.name} kernels, {threads} threads")
    return model


def load(args: ModelArgs, log: Log, load_runtime: Load = load_runtime, further: Sequence[type] = ()) -> Loaded:
    """Everything that the parameters of one model name. Raises the errors of `shapeshift.errors`.

    further: settings that stand beside those of this technique, and are read by others.
    """
    known = settings.names(FusedDecodeSettings, GeneratedDecodeSettings, *further)
    settings.refuse_unknown(args.parameters, known)
    own = settings.read(FusedDecodeSettings, args.parameters)
    generated = settings.read(GeneratedDecodeSettings, args.parameters)
    # What `make engines` states is relative to the model's folder.
    beside = args.folder / own.checkpoint
    folder = beside.resolve() if beside.is_dir() else find(own.checkpoint)
    tokenizer_file = folder / TOKENIZER_FILE
    settings.require(tokenizer_file.is_file(), "checkpoint", str(folder), f"must hold {TOKENIZER_FILE}")
    if generated.checkpoint_sha256 and generated.checkpoint_sha256 != open_checkpoint(folder).sha256:
        raise EngineError(f"the checkpoint in {folder} has changed; run `make engines`")
    kernels = (args.folder / generated.kernel_cache).resolve() if generated.kernel_cache else _DEFAULT_CACHE
    remedy = f", one less than max_length ({own.max_length})"
    return Loaded(
        own,
        load_runtime(folder, own, kernels, f"cuda:{args.device_id}" if args.kind == "GPU" else "cpu", log),
        TextTokenizer(tokenizer_file, own.max_length - 1, "text_input", remedy),
        token_bytes(tokenizer_file),
        folder,
        kernels,
    )


def _free_mb(device: str) -> float:
    """Memory of a GPU that is free, in MiB."""
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device {device}: torch sees no CUDA device")
    return float(torch.cuda.mem_get_info(device)[0]) / 2**20
