"""What the adapter cache counts."""

from __future__ import annotations

from shapeshift.serving.metrics import Counter, Counters, Histogram, Metric

_LOAD_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
ROOM, SLOT, GONE = "room", "slot", "gone"
"""Why an adapter left the pool: for another one, for a request's slot, because nobody may ask for it any more."""
MOST_LABELS = 100


class CacheMeters:
    """Counters of one cache; `exported` lists all of them."""

    def __init__(self) -> None:
        self.hits = Counter("adapter_hits_total", "Requests admitted whose adapter was in the pool already")
        self.misses = Counter("adapter_misses_total", "Requests admitted whose adapter had to be loaded for them")
        self.loaded = Counter("adapter_loaded_bytes_total", "Bytes of adapters loaded")
        self.load_ms = Histogram("adapter_load_ms", "Time of a load", _LOAD_MS)
        self.failed = Counter("adapter_load_failures_total", "Loads that failed")
        self.refused = Counter("adapter_refusals_total", "Entries of the registry that were refused when it changed")
        self.requests = Counters("adapter_requests_total", "Requests by adapter", "adapter", MOST_LABELS)
        self.evictions = {
            why: Counter("adapter_evictions_total", "Adapters that left the pool, by reason", {"why": why})
            for why in (ROOM, SLOT, GONE)
        }

    @property
    def exported(self) -> list[Metric]:
        return [
            *(self.hits, self.misses, self.loaded, self.load_ms, self.failed, self.refused, self.requests),
            *self.evictions.values(),
        ]
