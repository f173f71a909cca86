"""From a model's parameters to its checkpoint, tokenizer and runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import Logger
from pathlib import Path

import torch

from shapeshift import settings
from shapeshift.engines.checkpoint import find_folder, not_found, open_checkpoint
from shapeshift.engines.hardware import DEVICE_MEMORY, available_mb
from shapeshift.engines.text import chat_template_files
from shapeshift.engines.text.chat_template_files import ChatTemplateFiles
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import EngineError
from shapeshift.files import HASHES
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import require_tokens_of_model, token_bytes, with_special_tokens
from shapeshift.fused_decode.interfaces import Runtime, StepBatch, blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.kv_cache import cache_bytes, state_numbers
from shapeshift.fused_decode.model.tensor_layout import experts_bytes, weight_bytes
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import (
    COMPUTED_BYTES,
    FusedDecodeSettings,
    GeneratedDecodeSettings,
    MemoryNeed,
    computed,
    require_kv_precision,
    resolve,
)
from shapeshift.serving.model_args import ModelArgs
from shapeshift.settings import Choices

_MIB = 2**20
_DEFAULT_KERNEL_CACHE = Path.home() / ".cache" / "shapeshift"
Load = Callable[[Path, FusedDecodeSettings, Path, str, Logger, str], Runtime]
RUNTIMES: Choices[Callable[..., Runtime]] = Choices(
    "device",
    {
        "cpu": "shapeshift.fused_decode.model.cpu_runtime:load",
        "cuda": "shapeshift.fused_decode.model.cuda_runtime:load",
        "ranks": "shapeshift.fused_decode.ranks.runtime:load",
    },
)


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate.

    token_bytes   the bytes of each token of the vocabulary; none for special tokens
    all_bytes     the same with those of special tokens
    folder        of the checkpoint
    tokenizer_file  the tokenizer.json that is served
    chat          its chat template and special tokens
    kernel_cache  folder of the compiled kernels
    pool          the blocks of its cache
    """

    settings: FusedDecodeSettings
    runtime: Runtime
    tokenizer: TextTokenizer
    token_bytes: Sequence[bytes]
    all_bytes: Sequence[bytes]
    folder: Path
    tokenizer_file: Path
    chat: ChatTemplateFiles
    kernel_cache: Path
    pool: BlockPool


def load_runtime(
    folder: Path,
    decode: FusedDecodeSettings,
    kernel_cache: Path,
    device: str,
    log: Logger,
    checkpoint_sha256: str = "",
    extra_bytes: int = 0,
) -> Runtime:
    """The model of a checkpoint folder on `device` (cpu or cuda:0). Allocates nothing where the memory is too small.

    checkpoint_sha256: under which packed weights are shared; empty: they are not
    extra_bytes: memory after the last slot, for other uses. The bound is the sum over the ranks.
    """
    kind, ranks = device.partition(":")[0], decode.tensor_parallel_size
    architecture = Architecture.read(folder)
    # First: what does not fit may be a wrong number in config.json.
    WeightFiles(folder, architecture)
    require_kv_precision(decode.kv_precision, kind == "cuda")
    precision = resolve(decode.precision, torch.device(device).index, architecture.packed_bits)
    if state_numbers(architecture):
        allowed = f"0: what the states of a {architecture.family} hold of refused tokens cannot be taken back"
        settings.require(
            not decode.num_speculative_tokens, "num_speculative_tokens", decode.num_speculative_tokens, allowed
        )
        log.info("no prefix caching: the state of a text is known where the text ends, and nowhere else")
    need = need_of(architecture, decode, precision, extra_bytes)
    available, place = available_mb(), "available"
    if kind == "cuda":
        free, place = DEVICE_MEMORY[kind](torch.device(device).index)
        available = ranks * free
    log.info(need.line(available, place))
    need.require(available, place)
    runtime = RUNTIMES[kind if ranks == 1 else "ranks"](
        folder,
        decode,
        precision=precision,
        device=device,
        kernel_cache=kernel_cache,
        extra_elements=extra_bytes // COMPUTED_BYTES[computed(precision)],
        checkpoint_sha256=checkpoint_sha256,
        log=log,
    )
    try:
        runtime.longest_step_s = measure_longest_step_s(runtime, decode.prefill_tokens)
    except BaseException:
        runtime.close()
        raise
    return runtime


def load(args: ModelArgs, log: Logger, open_runtime: Load = load_runtime, further: Sequence[type] = ()) -> Loaded:
    """Everything that the parameters of one model name. Raises the errors of `shapeshift.errors`.

    further: settings classes of another technique, whose parameters are allowed beside these.
    """
    settings.refuse_unknown(args.parameters, settings.names(FusedDecodeSettings, GeneratedDecodeSettings, *further))
    decode = settings.read(FusedDecodeSettings, args.parameters)
    generated = settings.read(GeneratedDecodeSettings, args.parameters)
    # `make engines` writes paths relative to the model's folder, also for ids of a hub: serving downloads nothing.
    named = str(args.folder / decode.checkpoint)
    folder = find_folder(named)
    if folder is None:
        raise not_found(named)
    tokenizer_file = (args.folder / args.version if generated.tokenizer_key else folder) / TOKENIZER_FILE
    settings.require(tokenizer_file.is_file(), "checkpoint", str(folder), f"must hold {TOKENIZER_FILE}")
    kernel_cache = (args.folder / generated.kernel_cache).resolve() if generated.kernel_cache else _DEFAULT_KERNEL_CACHE
    hashes = kernel_cache.with_name(HASHES) if generated.kernel_cache else None
    expected = generated.checkpoint_sha256
    if expected and expected != open_checkpoint(folder, hashes=hashes).sha256:
        raise EngineError(f"the checkpoint in {folder} has changed; run `shapeshift engines`")
    device = f"cuda:{args.device_id}" if args.kind == "GPU" else "cpu"
    remedy = f", one less than max_length ({decode.max_length})"
    table = token_bytes(tokenizer_file)
    runtime = open_runtime(folder, decode, kernel_cache, device, log, expected)
    if not generated.tokenizer_key:
        require_tokens_of_model(table, runtime.vocab_size, decode.extra_tokens)
    vocabulary, chat = runtime.vocab_size, chat_template_files.read(tokenizer_file.parent)
    tokenizer = TextTokenizer(tokenizer_file, decode.max_length - 1, "text_input", remedy, vocab_size=vocabulary)
    # A chat model may end its turns with a token that only its tokenizer calls the last one; vLLM ends there, too.
    end = tokenizer.encode_piece(chat.special_tokens.get("eos_token", ""))
    runtime.eos_ids |= frozenset(end if len(end) == 1 and end[0] < vocabulary else ())
    return Loaded(
        decode,
        runtime,
        tokenizer,
        table,
        with_special_tokens(table, tokenizer.special_texts()),
        folder,
        tokenizer_file,
        chat,
        kernel_cache,
        BlockPool(runtime.blocks, caching=decode.enable_prefix_caching and runtime.shares_prefixes),
    )


def measure_longest_step_s(runtime: Runtime, prefill_tokens: int) -> float:
    """Seconds of a pass over a prompt of `prefill_tokens` tokens, for which the first slot and blocks must be free."""
    tokens = min(prefill_tokens, runtime.max_length)
    first, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), tokens, dtype=torch.int32)
    prompt = torch.zeros(tokens, dtype=torch.int64)
    blocks = torch.arange(blocks_of(tokens), dtype=torch.int32)[None]
    batch = StepBatch(prompt, slots=first, starts=first, lengths=length, logit_rows=first.long(), blocks=blocks)

    def run() -> float:
        start = time.monotonic()
        runtime.forward(batch).cpu()
        return time.monotonic() - start

    # On a thread that ends: each thread that computes keeps its pool of OpenMP threads.
    with ThreadPoolExecutor(1, thread_name_prefix="temporary") as executor:
        return executor.submit(run).result()


def need_of(
    architecture: Architecture, decode: FusedDecodeSettings, precision: str, adapter_bytes: int = 0
) -> MemoryNeed:
    """What the model with these settings allocates in this precision, one of `settings.WEIGHT_BITS`."""
    ranks, blocks = decode.tensor_parallel_size, blocks_of(decode.kv_cache_tokens)
    share, slots = architecture.share(ranks), decode.max_concurrency
    cache = ranks * cache_bytes(share, slots, decode.max_length, precision, blocks, decode.kv_precision)
    tokens = decode.prefill_tokens + slots * (1 + decode.num_speculative_tokens)
    weights = weight_bytes(architecture, precision, decode.group_size, ranks)
    working = experts_bytes(architecture, precision, tokens)
    return MemoryNeed(decode, weights / _MIB, cache / _MIB, adapter_bytes / _MIB, working / _MIB)
