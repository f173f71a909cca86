"""What a config.pbtxt says about a model that generates, or that forwards to one."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.settings import require

PRECISIONS = ("auto", "f32", "bf16")


@dataclass(frozen=True)
class FusedDecodeSettings:
    """Parameters of the process that owns the decode loop.

    checkpoint       folder (absolute, under build/checkpoints or checkpoints/) or hub id
    precision        auto (bf16 where the hardware has it, else f32), f32 or bf16
    max_concurrency  slots: requests that may run at once
    max_length       tokens that a slot holds, prompt and answer together
    prefill_tokens   most tokens of prompts that one iteration computes beside the running requests
    queue_requests   requests that may wait for a slot; a further one is answered UNAVAILABLE
    queue_tokens     tokens that the waiting requests may come to, prompts and longest answers
    threads          threads of the model's kernels; 0: one a core
    native           whether the kernels written in C++ are compiled and used
    compaction       whether running requests are moved together when none waits for the holes between them
    memory_mb        most memory that weights and cache may take; 0: what is available when the model loads
    slo_ms           latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    """

    checkpoint: str
    precision: str = "auto"
    max_concurrency: int = 32
    max_length: int = 1024
    prefill_tokens: int = 256
    queue_requests: int = 1024
    queue_tokens: int = 1048576
    threads: int = 0
    native: bool = True
    compaction: bool = True
    memory_mb: int = 0
    slo_ms: float = 0.0

    def __post_init__(self) -> None:
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "a folder or a hub id")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(1 <= self.max_concurrency <= 4096, "max_concurrency", self.max_concurrency, "1 to 4096")
        require(2 <= self.max_length <= 1_048_576, "max_length", self.max_length, "2 to 1048576")
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "at least 1")
        require(self.queue_requests >= 1, "queue_requests", self.queue_requests, "at least 1")
        require(self.queue_tokens >= 1, "queue_tokens", self.queue_tokens, "at least 1")
        require(0 <= self.threads <= 1024, "threads", self.threads, "0 to 1024")
        require(self.memory_mb >= 0, "memory_mb", self.memory_mb, "0 or more")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")


@dataclass(frozen=True)
class GeneratedDecodeSettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    checkpoint_sha256  what the checkpoint must hold
    kernel_cache       folder of compiled kernels; empty: .cache/shapeshift in the home directory
    generation         counts the loads that replaced a dead process
    """

    checkpoint_sha256: str = ""
    kernel_cache: str = ""
    generation: int = 0


@dataclass(frozen=True)
class ForwardSettings:
    """Parameters of a model that answers plain inference requests by asking another one.

    forward_to        the decoupled model that generates
    forward_requests  requests that may be under way; a further one is answered UNAVAILABLE. The server must have
                      more threads than that for each model (its backend setting thread-pool-size)
    generation        counts the loads that replaced a dead process; left to the scheduler
    """

    forward_to: str
    forward_requests: int = 96
    generation: int = 0

    def __post_init__(self) -> None:
        require(bool(self.forward_to), "forward_to", self.forward_to, "the name of a model")
        require(1 <= self.forward_requests <= 4096, "forward_requests", self.forward_requests, "1 to 4096")
