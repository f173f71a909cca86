"""The parameters of adapters, their memory and their scheduler in a config.pbtxt, and what they select."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shapeshift.adapter_cache.policy.eviction import RankedEviction
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.settings import Choices, require

_PACKAGE = "shapeshift.adapter_cache"
UNUSED = "unused"
EVICTION_RULES: Choices[RankedEviction] = Choices(
    "eviction",
    {
        "gdsf": f"{_PACKAGE}.policy.eviction:GDSF",
        "score": f"{_PACKAGE}.policy.eviction:SCORE",
        "lru": f"{_PACKAGE}.policy.eviction:LRU",
        "lfu": f"{_PACKAGE}.policy.eviction:LFU",
        "fair": f"{_PACKAGE}.policy.eviction:FAIR_SCORE",
        UNUSED: f"{_PACKAGE}.policy.eviction:UNUSED",
    },
)
"""The first is the default."""
SCHEDULERS: Choices[Callable[[SchedulerInputs], Admission[Any]]] = Choices(
    "scheduler",
    {
        "arrival": f"{_PACKAGE}.policy.admission:ArrivalOrder",
        "chameleon": f"{_PACKAGE}.policy.multiqueue:MultiQueue",
        "fifo": f"{_PACKAGE}.policy.admission:BlockingArrivalOrder",
        "sjf": f"{_PACKAGE}.policy.baselines.sorted_orders:ShortestAnswerFirst",
        "wrs": f"{_PACKAGE}.policy.baselines.sorted_orders:SmallestRequestFirst",
    },
)
HOST_TIERS: Choices[Callable[..., Any]] = Choices("device", {"cuda": f"{_PACKAGE}.memory.host_tier:HostTier"})
"""What a device needs whose memory is not that of the host."""
PREFETCHERS: Choices[Callable[[], Any]] = Choices("prefetch", {"gaps": f"{_PACKAGE}.policy.prefetch:GapHistograms"})
LORA_KERNELS: Choices[Callable[..., Any]] = Choices(
    "lora_kernels",
    {
        "native": f"{_PACKAGE}.lora.native:load",
        "torch": f"{_PACKAGE}.lora.segmented:TorchLora",
        "grouped": f"{_PACKAGE}.lora.grouped_loading:load",
    },
)
LORA_HOOKS: Choices[Callable[..., Any]] = Choices("device", {"cuda": f"{_PACKAGE}.lora.grouped:GraphLoraHook"})
"""Where steps are CUDA graphs."""
FIRST_USE: Choices[Callable[..., Any]] = Choices(
    "adapter_sources", {"process": f"{_PACKAGE}.registry.first_use:FirstUse"}
)
"""What fetches adapters that requests name."""
_SOURCE = re.compile(r"/.*|[A-Za-z0-9][\w.-]*/[\w.-]*", re.ASCII)


@dataclass(frozen=True)
class AdapterSettings:
    """Parameters of adapters and of the memory that holds them. A text model takes them where it states `adapter_mb`.

    adapters_dir   the registry: a folder with registry.json; empty: adapters/<model> in the build folder
    starter_dir    folder of PEFT folders, a path or under checkpoints/, that `make engines` registers if there is no
                   registry yet, or none for this base model
    adapter_sources  from where an adapter that is not registered is fetched when a request names it: folders, absolute,
                   and beginnings of hub ids, from the owner on (mine/, theirs/lora-), separated by commas; empty: from
                   nowhere
    base_names     further names of the base model in adapter_config.json, separated by commas
    max_rank       highest rank of an adapter
    adapter_mb     MiB of memory reserved for adapters; slots without a request hold further adapters
    eviction       which adapters are evicted first: gdsf, score, lru, lfu or fair; unused: each one as soon as no
                   request uses it or waits for it
    prefetch       whether adapters are loaded before a request asks for them, by the gaps between their requests
    """

    adapters_dir: str = ""
    starter_dir: str = ""
    adapter_sources: str = ""
    base_names: str = ""
    max_rank: int = 128
    adapter_mb: int = 256
    eviction: str = "gdsf"
    prefetch: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.max_rank <= 4096, "max_rank", self.max_rank, "1 to 4096")
        require(1 <= self.adapter_mb <= 1 << 20, "adapter_mb", self.adapter_mb, "1 to 1048576")
        for source in self.sources:
            allowed = "absolute folders and beginnings of hub ids, such as owner/"
            require(_SOURCE.fullmatch(source) is not None, "adapter_sources", source, allowed)
        EVICTION_RULES.require(self.eviction)

    @property
    def sources(self) -> list[str]:
        """The parts of `adapter_sources`."""
        return [source for part in self.adapter_sources.split(",") if (source := part.strip())]


@dataclass(frozen=True)
class AdapterCacheSettings(AdapterSettings):
    """Of a model that generates.

    host_mb        on a GPU: MiB of page-locked memory of the host for adapters that leave the GPU; 0: none
    scheduler      which waiting requests get the free slots: arrival (in order of arrival, a load blocks no other
                   request), fifo (a load blocks all requests behind it), chameleon (size queues with quotas), sjf
                   (shortest answer first), wrs (smallest weighted request size first)
    predictor_weights  a .npy file of `length_prediction.WordRegressor`, absolute or from the model's folder: the answer
                   lengths of requests without an adapter are predicted from the words of the prompts; empty: each is
                   the mean of recent answers
    """

    host_mb: int = 1024
    scheduler: str = "arrival"
    predictor_weights: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.host_mb <= 1 << 20, "host_mb", self.host_mb, "0 to 1048576")
        SCHEDULERS.require(self.scheduler)


def require_one_rank(decode: FusedDecodeSettings) -> None:
    """Raise InvalidInputError for tensor parallelism: adapters and their terms are in one process."""
    ranks = decode.tensor_parallel_size
    require(ranks == 1, "tensor_parallel_size", ranks, "1 for a model with adapters")
