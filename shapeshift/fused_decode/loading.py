"""From a model's parameters to its checkpoint, tokenizer and runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeshift import settings
from shapeshift.engines import precision
from shapeshift.engines.checkpoint import find, open_checkpoint
from shapeshift.engines.hardware import available_mb, cores
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.tokenizer import TextTokenizer
from shapeshift.errors import EngineError
from shapeshift.fused_decode.architecture import Architecture
from shapeshift.fused_decode.cache import cache_bytes
from shapeshift.fused_decode.detokenize import token_bytes
from shapeshift.fused_decode.memory import require_memory
from shapeshift.fused_decode.model import DecodeModel
from shapeshift.fused_decode.settings import FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.fused_decode.step import Runtime
from shapeshift.fused_decode.weights import weight_bytes
from shapeshift.serving.model_args import ModelArgs

_DEFAULT_CACHE = Path.home() / ".cache" / "shapeshift"
Log = Callable[[str], None]
Load = Callable[[Path, FusedDecodeSettings, Path, Log], Runtime]


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate: its settings, and the way from text to tokens and back."""

    own: FusedDecodeSettings
    runtime: Runtime
    tokenizer: TextTokenizer
    table: Sequence[bytes]


def load_runtime(folder: Path, own: FusedDecodeSettings, kernels: Path, log: Log) -> Runtime:
    """The model in a checkpoint folder, once its memory bound is known to fit."""
    stated = precision.resolve(own.precision)
    architecture = Architecture.read(folder)
    slot = cache_bytes(architecture, 1, own.max_length, stated)
    weights = weight_bytes(architecture, stated)
    require_memory(weights, slot, own.max_concurrency, own.max_length, own.memory_mb, available_mb(), log)
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
    )
    log(f"ready: {architecture.family}, {stated}, {model.operations.name} kernels, {threads} threads")
    return model


def load(args: ModelArgs, log: Log, load_runtime: Load = load_runtime) -> Loaded:
    """Everything that the parameters of one model name. Raises the errors of `shapeshift.errors`."""
    known = settings.names(FusedDecodeSettings, GeneratedDecodeSettings)
    settings.refuse_unknown(args.parameters, known)
    own = settings.read(FusedDecodeSettings, args.parameters)
    generated = settings.read(GeneratedDecodeSettings, args.parameters)
    folder = find(own.checkpoint)
    tokenizer_file = folder / TOKENIZER_FILE
    settings.require(tokenizer_file.is_file(), "checkpoint", str(folder), f"must hold {TOKENIZER_FILE}")
    if generated.checkpoint_sha256 and generated.checkpoint_sha256 != open_checkpoint(folder).sha256:
        raise EngineError(f"the checkpoint in {folder} has changed; run `make engines`")
    kernels = Path(generated.kernel_cache) if generated.kernel_cache else _DEFAULT_CACHE
    remedy = f", one less than max_length ({own.max_length})"
    return Loaded(
        own,
        load_runtime(folder, own, kernels, log),
        TextTokenizer(tokenizer_file, own.max_length - 1, "text_input", remedy),
        token_bytes(tokenizer_file),
    )
