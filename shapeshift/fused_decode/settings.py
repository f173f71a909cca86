"""What a config.pbtxt states of a model that generates, or forwards to one: parameters, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shapeshift.engines import hardware
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.fused_decode.declarations import INPUTS, OUTPUTS
from shapeshift.serving.bounds import classes_of
from shapeshift.serving.description import TOOL_PARSERS
from shapeshift.serving.model_args import DESCRIPTION, FrontSettings, Signature
from shapeshift.settings import require

COMPUTED_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of a number of the computation: an activation, a key, a value."""
WEIGHT_BITS = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "int4": 4}
"""Bits of a weight of a layer's linear."""
QUANTISED = tuple(name for name in WEIGHT_BITS if name not in COMPUTED_BYTES)
ON_CPU = tuple(name for name in WEIGHT_BITS if name != "f16")
HEAD_BITS = 8
"""Bits of a weight of the output head of a quantised model: what is lost there changes every token."""
GROUP_SIZES = (128, 32)
KV_PRECISIONS = ("auto", "int8")
"""Values of `kv_precision`: the type of the computation, or 8 bits with a scale for each token and head."""
_SCALE_BYTES = 4
PRECISIONS = ("auto", *WEIGHT_BITS)
MOST_DRAFTED = 15
"""Most tokens that are proposed for a row. With them its text needs at most one block more, and the kernels compute
up to 16 tokens of a row as they compute a single one."""


@dataclass(frozen=True)
class FusedDecodeSettings(FrontSettings):
    """Parameters of the process that owns the decode loop.

    checkpoint       folder (absolute, under build/checkpoints or checkpoints/) or hub id (owner/model@revision)
    precision        auto (bf16 where the hardware has it, else f32, on a GPU f16), f32, bf16, f16 on a GPU, or, with
                     quantised weights on a CPU, int8 or int4
    group_size       inputs of an output that share a scale in int4: 32 or 128; 0: 128 where it divides them, else 32
    kv_precision     of the keys and values in the cache: auto (that of the computation), or int8 on a CPU
    max_concurrency  slots: most requests that run at once
    max_length       most tokens of a request, prompt and answer together
    kv_cache_tokens  tokens of the requests that run, together; 0: max_concurrency times max_length. Where they run out,
                     the youngest request is preempted, and continues later
    enable_prefix_caching  whether requests share the keys and values of equal beginnings, with ended ones too
    prefill_tokens   most tokens of prompts in one iteration
    num_speculative_tokens  most tokens that are proposed for a request in an iteration, where that pays; 0: none. They
                     are what followed its last tokens where these occurred before
    queue_requests   most requests that wait for a slot; a further one gets UNAVAILABLE
    slo_classes      values of the request parameter slo_class, the most urgent first; *: all others, and none
    threads          threads of the model's kernels; 0: one for each core
    tensor_parallel_size  processes that compute each iteration together, with a part of every layer each
    native           whether the kernels written in C++ are compiled and used
    share_weights    whether processes that serve one checkpoint alike map one file of its packed weights, on a CPU
    memory_mb        most memory in MiB for weights and cache; 0: the memory that is available when the model loads
    extra_tokens     whether the tokenizer may have tokens beyond the model's vocabulary; a prompt with one is refused
    tool_parser      form in which the model writes calls of tools, see docs/gateway.md; empty: the gateway finds it
    slo_ms           latency objective in ms; its half and 95% of it become bounds of the latency histogram; 0: none
    """

    checkpoint: str
    precision: str = "auto"
    group_size: int = 0
    kv_precision: str = "auto"
    max_concurrency: int = 32
    max_length: int = 1024
    kv_cache_tokens: int = 0
    enable_prefix_caching: bool = True
    prefill_tokens: int = 256
    num_speculative_tokens: int = 0
    queue_requests: int = 1024
    slo_classes: str = "interactive,*,batch"
    threads: int = 0
    tensor_parallel_size: int = 1
    native: bool = True
    share_weights: bool = True
    memory_mb: int = 0
    extra_tokens: bool = False
    tool_parser: str = ""
    slo_ms: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        sizes = (0, *sorted(GROUP_SIZES))
        require(self.group_size in sizes, "group_size", self.group_size, f"one of {', '.join(map(str, sizes))}")
        allowed = f"one of {', '.join(KV_PRECISIONS)}"
        require(self.kv_precision in KV_PRECISIONS, "kv_precision", self.kv_precision, allowed)
        require(1 <= self.max_concurrency <= 4096, "max_concurrency", self.max_concurrency, "1 to 4096")
        require(2 <= self.max_length <= 1_048_576, "max_length", self.max_length, "2 to 1048576")
        if self.kv_cache_tokens:
            limit = f"0, or at least max_length ({self.max_length})"
            require(self.kv_cache_tokens >= self.max_length, "kv_cache_tokens", self.kv_cache_tokens, limit)
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "at least 1")
        proposed = self.num_speculative_tokens
        require(0 <= proposed <= MOST_DRAFTED, "num_speculative_tokens", proposed, f"0 to {MOST_DRAFTED}")
        require(self.queue_requests >= 1, "queue_requests", self.queue_requests, "at least 1")
        classes_of(self.slo_classes)
        require(0 <= self.threads <= 1024, "threads", self.threads, "0 to 1024")
        require(1 <= self.tensor_parallel_size <= 64, "tensor_parallel_size", self.tensor_parallel_size, "1 to 64")
        require(self.memory_mb >= 0, "memory_mb", self.memory_mb, "0 or more")
        parsers = ("", *TOOL_PARSERS)
        require(self.tool_parser in parsers, "tool_parser", self.tool_parser, f"one of {', '.join(TOOL_PARSERS)}")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")

    @property
    def classes(self) -> list[str]:
        """The names in `slo_classes`."""
        return classes_of(self.slo_classes)


@dataclass(frozen=True)
class MemoryNeed:
    """MiB that a model with the settings `params` allocates when it is loaded, of all ranks together.

    weights_mb: in the precision and the layouts of the computation. cache_mb: of `kv_cache_tokens` where they are
    stated, else of all slots. adapters_mb: reserved for adapters. working_mb: in which the experts of a layer compute.
    """

    params: FusedDecodeSettings
    weights_mb: float
    cache_mb: float
    adapters_mb: float = 0.0
    working_mb: float = 0.0

    @property
    def fixed_mb(self) -> float:
        """All but the cache."""
        return self.weights_mb + self.adapters_mb + self.working_mb

    @property
    def total_mb(self) -> float:
        """All of it."""
        return self.fixed_mb + self.cache_mb

    def parts(self) -> dict[str, float]:
        """By part, as in `device_plan`."""
        parts = {"engines": self.weights_mb + self.working_mb, "KV": self.cache_mb, "adapters": self.adapters_mb}
        return {name: size for name, size in parts.items() if size or name != "adapters"}

    def fitting(self, mb: float, of: int) -> int:
        """How many of the cache's `of` slots or tokens fit in `mb` MiB; negative where not even the weights do."""
        return int((mb - self.fixed_mb) * of // self.cache_mb)

    def line(self, available_mb: float, place: str = "available") -> str:
        """The bound, beside what there is; place: what is said of `available_mb`."""
        allowed, source = self._allowed(available_mb, place)
        params, fixed = self.params, self.fixed_mb
        tokens = params.kv_cache_tokens
        slots = f"{params.max_concurrency} slots of {params.max_length} tokens"
        cache = f"KV cache of {tokens} tokens" if tokens else slots
        return (
            f"memory bound {self.total_mb:.0f} MiB: weights {fixed:.0f} MiB, {cache} {self.cache_mb:.0f} MiB; "
            f"{source}: {allowed:.0f} MiB"
        )

    def require(self, available_mb: float, place: str = "available") -> None:
        """Raise InvalidInputError, with the most that fits, where it does not; place: as in `line`."""
        allowed, source = self._allowed(available_mb, place)
        if self.total_mb <= allowed:
            return
        params, room = self.params, f"in {allowed:.0f} MiB ({source})"
        tokens, slots, longest = params.kv_cache_tokens, params.max_concurrency, params.max_length
        if tokens and (most := self.fitting(allowed, tokens)) >= longest:
            raise InvalidInputError("kv_cache_tokens", tokens, f"at most {most} {room}")
        if not tokens and (most := self.fitting(allowed, slots)) >= 1:
            raise InvalidInputError("max_concurrency", slots, f"at most {most} with max_length {longest} {room}")
        slot_mb = self.cache_mb * longest / tokens if tokens else self.cache_mb / slots
        least = self.total_mb - self.cache_mb + slot_mb + 1
        raise InvalidInputError(
            "memory_mb", params.memory_mb, f"at least {least:.0f} for one slot; {allowed:.0f} MiB {source}"
        )

    def _allowed(self, available_mb: float, place: str) -> tuple[float, str]:
        limit_mb = self.params.memory_mb
        return (limit_mb, "memory_mb") if 0 < limit_mb <= available_mb else (available_mb, place)


@dataclass(frozen=True)
class GeneratedDecodeSettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    checkpoint_sha256  hash that the checkpoint must have; empty: any
    checkpoint_origin  repository and commit of a hub that it comes from, owner/model@commit; empty: none
    checkpoint_name    `checkpoint` as the user wrote it, before it became a path
    tokenizer_key      of what the tokenizer in the version's folder was made; empty: the checkpoint's own is read
    kernel_cache       folder of compiled kernels and packed weights; empty: .cache/shapeshift in the home directory
    generation         counts the loads that replaced a dead process
    device_memory      what the model wants of the memory of its device, see `engines.device_plan`
    """

    checkpoint_sha256: str = ""
    checkpoint_origin: str = ""
    checkpoint_name: str = ""
    tokenizer_key: str = ""
    kernel_cache: str = ""
    generation: int = 0
    device_memory: str = ""


@dataclass(frozen=True)
class ForwardSettings(FrontSettings):
    """Parameters of a model that forwards plain inference requests to a decoupled one.

    forward_to        the decoupled model that generates
    forward_timeout_s most seconds that a request may take; then it gets UNAVAILABLE
    grpc_url          HOST:PORT of this server's gRPC interface; empty: that of `shapeshift serve`, else localhost:8001
    """

    forward_to: str
    forward_timeout_s: float = 600.0
    grpc_url: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.forward_to), "forward_to", self.forward_to, "the name of a model")
        require(0 < self.forward_timeout_s <= 86_400, "forward_timeout_s", self.forward_timeout_s, "above 0, to 86400")


@dataclass(frozen=True)
class GeneratedForwardSettings:
    """Parameters of such a model that `make engines` and the sidecar add.

    generation  counts the loads that replaced a dead process
    """

    generation: int = 0


# What the values of `precision` mean: the type of the computation, and the bits of the weights.


def resolve(requested: str, device: int | None = None, packed_bits: int = 0) -> str:
    """One of WEIGHT_BITS; see `hardware.resolve_precision`. Raises UnsupportedError for what the device lacks.

    device: the number of a GPU, None for the CPU. packed_bits: of weights that are quantised in the
    checkpoint, which stay as they are on a CPU with "auto"; 0: they are not.
    """
    if requested == "auto" and packed_bits and device is None:
        return f"int{packed_bits}"
    if requested not in QUANTISED:
        return hardware.resolve_precision(requested, device=device)
    if device is not None:
        raise UnsupportedError(f"precision: {requested} is for CPUs; set bf16, f16, f32 or auto for a GPU")
    return requested


def computed(precision: str) -> str:
    """f32, bf16 or f16: the type of all that is no weight of a linear.

    With quantised weights bf16 where this CPU has it, else f32.
    """
    return hardware.resolve_precision("auto") if precision in QUANTISED else precision


def vector_bytes(head_dim: int, number_bytes: int, kv_precision: str) -> int:
    """Bytes of a cached key or value of one head; number_bytes: those of a number of the computation."""
    return head_dim + _SCALE_BYTES if kv_precision == "int8" else head_dim * number_bytes


def require_kv_precision(requested: str, on_gpu: bool) -> None:
    """Raises UnsupportedError where the device lacks it."""
    if on_gpu and requested != "auto":
        raise UnsupportedError(f"kv_precision: {requested} is for CPUs; set auto for a GPU")


def group_of(bits: int, inputs: int, group_size: int = 0) -> int:
    """The inputs of a linear that share a scale, 0 for all: with 4 bits `group_size`, and where that is 0 the first of
    GROUP_SIZES that divides `inputs`, else the last one."""
    if bits == 8:
        return 0
    return group_size or next((size for size in GROUP_SIZES if inputs % size == 0), GROUP_SIZES[-1])


# Of all models here.


def signature(parameters: Mapping[str, str]) -> Signature:
    """Of a model that generates, which is decoupled, or, with `forward_to`, of one that forwards to it."""
    return Signature(
        inputs=tuple(one.tensor() for one in INPUTS),
        outputs=(*(one.tensor() for one in OUTPUTS), DESCRIPTION),
        max_batch_size=0,
        decoupled="forward_to" not in parameters,
    )
