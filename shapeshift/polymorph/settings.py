"""What a polymorph model states in its config.pbtxt: parameters, inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeshift.engines.execution.executor import ExecutorSettings
from shapeshift.engines.interfaces import OUTPUT_AXES
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.policy.algorithms import ALLOCATIONS, DISPATCHERS
from shapeshift.serving.model_args import DESCRIPTION, TOKENS, Signature, Tensor
from shapeshift.serving.text_inputs import ENGINE_MS, NUM_TOKENS, OFFSETS, TEXT_PAIR
from shapeshift.settings import require

PLACEMENTS = ("inline", "resident", "partitioned", "auto")
CURVES = ("md1", "clamped")
MAX_WORKERS = 256

_INPUTS = (
    Tensor("TEXT", "TYPE_STRING", optional=True),
    Tensor("INPUT_IDS", "TYPE_INT64", (-1,), optional=True),
    Tensor("ATTENTION_MASK", "TYPE_INT64", (-1,), optional=True),
    Tensor(TEXT_PAIR, "TYPE_STRING", optional=True, listed=True),
)
SPARSE_OUTPUTS = SPARSE_INDICES, SPARSE_VALUES = "SPARSE_INDICES", "SPARSE_VALUES"
"""What the front makes of TOKEN_WEIGHTS or TERM_WEIGHTS."""
ENTITIES = "ENTITIES"
"""What the front makes of TOKEN_LOGITS."""
WORKER_INPUTS = (Tensor("INPUT_IDS", "TYPE_INT64", (-1,)), Tensor("LENGTHS", "TYPE_INT32", (-1,)))
WORKER_STATE = Tensor("STATE", "TYPE_INT64", (6,))
"""The output of a worker beside those of its engines."""


@dataclass(frozen=True)
class PolymorphSettings(ExecutorSettings):
    """Parameters of the serving processes, and of the plan that the sidecar makes for them; see `ExecutorSettings`.

    placement       inline: the front's own process holds the engines; resident: workers hold all of them;
                    partitioned: each worker holds one; auto: chosen by `make engines`, which reports why
    slo_ms          latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    workers         workers at first; 0: one for each GPU, else two
    min_workers     fewest workers that the sidecar keeps; 0: `workers`
    max_workers     most workers; 0: `workers`
    dimensions      widths to which clients may cut vectors, "64,128", or any; empty: those that the checkpoint states
    dispatch        how the front chooses a worker: one of DISPATCHERS
    allocation      how the sidecar divides the workers among the bins: one of ALLOCATIONS
    curve           latency curve of the allocation: md1, or clamped. With clamped, as in the paper, the longest bin
                    need not have the capacity that it needs, and waiting texts do not add to the demand
    """

    placement: str = "auto"
    slo_ms: float = 0.0
    workers: int = 0
    min_workers: int = 0
    max_workers: int = 0
    dimensions: str = ""
    dispatch: str = "earliest_finish"
    allocation: str = "exact"
    curve: str = "md1"

    def __post_init__(self) -> None:
        super().__post_init__()
        DISPATCHERS.require(self.dispatch)
        ALLOCATIONS.require(self.allocation)
        for field, allowed in (("placement", PLACEMENTS), ("curve", CURVES)):
            value = getattr(self, field)
            require(value in allowed, field, value, f"one of {', '.join(allowed)}")
        parts = self.dimensions.split(",") if self.dimensions not in ("", "any") else []
        valid = all(part.strip().isdecimal() and int(part) for part in parts)
        require(valid, "dimensions", self.dimensions, "any, or whole numbers above 0 with commas")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")
        self._check_workers()

    def _check_workers(self) -> None:
        require(0 <= self.workers <= MAX_WORKERS, "workers", self.workers, f"0 to {MAX_WORKERS}")
        require(0 <= self.max_workers <= MAX_WORKERS, "max_workers", self.max_workers, f"0 to {MAX_WORKERS}")
        limit = self.max_workers or self.workers or MAX_WORKERS
        require(0 <= self.min_workers <= limit, "min_workers", self.min_workers, f"0 to {limit}, the most workers")
        at_least = f"0, or at least workers ({self.workers})"
        require(self.max_workers == 0 or self.max_workers >= self.workers, "max_workers", self.max_workers, at_least)
        objective = "above 0 with placement partitioned, which divides the workers by it"
        require(self.placement != "partitioned" or self.slo_ms > 0, "slo_ms", self.slo_ms, objective)


@dataclass(frozen=True)
class PlacementSettings:
    """Parameters that `make engines` adds to a front, and the sidecar when it reloads one.

    bin_edges         JSON [tokens, ...]: the longest texts of the bins that workers may hold, ascending
    plan_histogram    JSON [weight, ...]: the expected share of texts in each bin before any traffic
    placement_reason  why `make engines` chose the placement for `auto`
    """

    bin_edges: str = "[]"
    plan_histogram: str = "[]"
    placement_reason: str = ""

    def edges(self) -> list[int]:
        """The bin edges. Raises InvalidInputError unless they ascend strictly from at least 1."""
        try:
            edges = json.loads(self.bin_edges)
            usable = all(isinstance(edge, int) for edge in edges) and all(
                low < high for low, high in zip([0, *edges], edges, strict=False)
            )
        except (ValueError, TypeError):
            usable = False
        if not usable:
            raise InvalidInputError("bin_edges", self.bin_edges, "a JSON list of whole numbers, ascending")
        return [int(edge) for edge in edges]


@dataclass(frozen=True)
class WorkerSettings:
    """Parameters of a worker model, `<front>_wNN`.

    worker_of   the front that it serves
    bin         longest text that it takes, in tokens; 0: any, all engines are loaded
    """

    worker_of: str = ""
    bin: int = 0

    def __post_init__(self) -> None:
        require(self.bin >= 0, "bin", self.bin, "0 or more")


def signature(parameters: Mapping[str, str]) -> Signature | None:
    """Of a model with these parameters; None for a worker, whose configuration `make engines` writes complete."""
    return None if parameters.get("worker_of") else front_signature(parameters)


def front_signature(parameters: Mapping[str, str]) -> Signature:
    """Of a front. One that lists no output has EMBEDDING, or with a `head` LOGITS."""
    default = "LOGITS" if parameters.get("head") else "EMBEDDING"
    computed = {name: tuple(-1 if axis == "tokens" else None for axis in axes) for name, axes in OUTPUT_AXES.items()}
    outputs = (
        *(Tensor(name, "TYPE_FP32", dims, listed=name != default) for name, dims in computed.items()),
        Tensor(SPARSE_INDICES, "TYPE_INT32", (-1,), listed=True),
        Tensor(SPARSE_VALUES, "TYPE_FP32", (-1,), listed=True),
        Tensor(ENTITIES, "TYPE_STRING", listed=True),
        Tensor(OFFSETS, "TYPE_INT32", (-1, 2), listed=True),
        Tensor(ENGINE_MS, "TYPE_FP32", listed=True),
        NUM_TOKENS,
        TOKENS,
        DESCRIPTION,
    )
    return Signature(_INPUTS, outputs)


def worker_signature(outputs: Sequence[Tensor]) -> Signature:
    """Of a worker whose engines have these outputs, dims [rows, ...]."""
    return Signature(WORKER_INPUTS, (*outputs, WORKER_STATE), max_batch_size=0)


def worker_name(front: str, number: int) -> str:
    """The model name of a front's worker."""
    return f"{front}_w{number:02d}"
