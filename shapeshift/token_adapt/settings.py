"""What a config.pbtxt says about serving images."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.token_adapt.adapter import ALGORITHMS, AdaptRules
from shapeshift.token_adapt.batching import BatchRules

LONGEST_LATENCY_MS = 86_400_000.0
GREATEST_UTILITY = 1e9


@dataclass(frozen=True)
class TokenAdaptSettings:
    """Parameters of the serving process.

    tasks_dir          folder of the tasks' registry
    task               task of a request that names none; empty: such a request is refused where there are several
    latency_ms         latency requirement of a request that states none; 0: its task's
    utility            utility of a request that states none; empty: its task's
    algorithm          grid, front, paper, paper_printed, by_rate or infaas
    use_gammas         gammas that may be chosen, separated by commas; empty: all that the model has
    batch_window_ms, batch_size, batch_deadline_ms, batch_utility  Algorithm 1's delta, epsilon, eta and mu
    batch_share        batches are no larger than needed for this share of the best throughput; 0: up to batch_size
    few_batches, high_utility, initial_ms  the paper's beta and kappa, and its initial stage
    tick_ms            tick of the grid
    price_window_ms    grid, front: what the device's time is worth goes by the arrivals of so long; 0: nothing
    margin_ms          time kept for an answer after its batch has run
    memory_mb          memory that a batch may take; 0: what is available when the model loads
    queue_images       images that may wait; further ones are answered UNAVAILABLE
    max_pixels         most pixels of an image
    decode_threads     threads that decode and resize
    threads            threads of the engines; 0: one a core
    slo_ms             latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    """

    tasks_dir: str = ""
    task: str = ""
    latency_ms: float = 0.0
    utility: float | None = None
    algorithm: str = "grid"
    use_gammas: str = ""
    batch_window_ms: float = 500.0
    batch_size: int = 64
    batch_deadline_ms: float = 500.0
    batch_utility: float = 0.8
    batch_share: float = 0.9
    few_batches: int = 5
    high_utility: float = 0.8
    initial_ms: float = 2000.0
    tick_ms: float = 1.0
    price_window_ms: float = 3000.0
    margin_ms: float = 5.0
    memory_mb: int = 0
    queue_images: int = 4096
    max_pixels: int = 25_000_000
    decode_threads: int = 1
    threads: int = 0
    slo_ms: float = 0.0

    def __post_init__(self) -> None:
        within = 0 <= self.latency_ms <= LONGEST_LATENCY_MS
        require(within, "latency_ms", self.latency_ms, f"0 to {LONGEST_LATENCY_MS:g}")
        valued = self.utility is None or 0 <= self.utility <= GREATEST_UTILITY
        require(valued, "utility", self.utility, f"0 to {GREATEST_UTILITY:g}")
        require(self.algorithm in ALGORITHMS, "algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        for name in ("batch_window_ms", "batch_deadline_ms", "batch_utility", "few_batches", "high_utility"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("initial_ms", "price_window_ms", "margin_ms", "memory_mb", "slo_ms"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(1 <= self.batch_size <= 4096, "batch_size", self.batch_size, "1 to 4096")
        require(0 <= self.batch_share <= 1, "batch_share", self.batch_share, "0 to 1")
        require(self.tick_ms > 0, "tick_ms", self.tick_ms, "above 0")
        require(self.queue_images >= 1, "queue_images", self.queue_images, "at least 1")
        require(self.max_pixels >= 1, "max_pixels", self.max_pixels, "at least 1")
        require(1 <= self.decode_threads <= 64, "decode_threads", self.decode_threads, "1 to 64")
        require(0 <= self.threads <= 1024, "threads", self.threads, "0 to 1024")
        self.gammas(())

    def gammas(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """The gammas that may be chosen, of those that the model has; InvalidInputError for text that names none."""
        if not self.use_gammas:
            return known
        try:
            return tuple(sorted({int(part) for part in self.use_gammas.split(",")}))
        except ValueError:
            wanted = "whole numbers separated by commas, such as -4,0,2"
            raise InvalidInputError("use_gammas", self.use_gammas, wanted) from None

    def rules(self, size: int, memory_mb: float) -> AdaptRules:
        """How the adapter decides, with batches of up to `size` images that need less than `memory_mb`."""
        return AdaptRules(
            algorithm=self.algorithm,
            batching=BatchRules(self.batch_window_ms, size, self.batch_deadline_ms, self.batch_utility),
            few_batches=self.few_batches,
            high_utility=self.high_utility,
            initial_ms=self.initial_ms,
            tick_ms=self.tick_ms,
            price_window_ms=self.price_window_ms,
            margin_ms=self.margin_ms,
            memory_mb=memory_mb,
        )
