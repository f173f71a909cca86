"""What a config.pbtxt says about adapters, beside what it says about the decode loop and the scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.adapter_cache.evict import ALGORITHMS
from shapeshift.settings import require


@dataclass(frozen=True)
class AdapterCacheSettings:
    """Parameters of adapters and of the memory that holds them.

    adapters_dir   the registry: a folder with registry.json; empty: adapters/<model> in the build folder
    starter_dir    folder of PEFT folders, absolute or under checkpoints/, that `make engines` registers where there
                   is no registry yet
    base_names     names beside its folder's, separated by commas, that the base goes by in adapter_config.json
    max_rank       greatest rank of an adapter
    adapter_mb     memory for adapters alone; slots without a request hold further ones
    caching        whether adapters stay in memory once nobody uses them; false only to compare
    eviction       who goes first where there is no room: gdsf, score, lru, lfu or fair
    prefetch       whether adapters are loaded before a request asks for them, by the gaps between their requests
    predictor_weights  a .npy file, see `predict.Regressor`: answers are foretold from their prompts' embeddings; empty:
                   by the mean of the adapter's answers
    predictor_model  the model that gives the embeddings
    stacked_ranks  up to this sum of ranks in a batch its adapters are stacked to one pair of factors; 0: never
    """

    adapters_dir: str = ""
    starter_dir: str = ""
    base_names: str = ""
    max_rank: int = 128
    adapter_mb: int = 256
    caching: bool = True
    eviction: str = "gdsf"
    prefetch: bool = False
    predictor_weights: str = ""
    predictor_model: str = "encode"
    stacked_ranks: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.max_rank <= 4096, "max_rank", self.max_rank, "1 to 4096")
        require(1 <= self.adapter_mb <= 1 << 20, "adapter_mb", self.adapter_mb, "1 to 1048576")
        require(self.eviction in ALGORITHMS, "eviction", self.eviction, f"one of {', '.join(ALGORITHMS)}")
        require(0 <= self.stacked_ranks <= 65536, "stacked_ranks", self.stacked_ranks, "0 to 65536")
