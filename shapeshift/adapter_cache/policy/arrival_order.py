"""Schedulers in order of arrival: the default, and S-LoRA's, in which a load blocks the requests behind it."""

from __future__ import annotations

from shapeshift.adapter_cache.policy.admission_base import AdmissionBase, T
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs
from shapeshift.fused_decode.policy.admission import ClassOrder

PRELOAD = 2
"""Requests whose adapters are loaded while no slot is free, if the memory has space that is not in slots."""


class ArrivalOrder(AdmissionBase[T]):
    """In order of class and arrival. A request whose adapter loads keeps its slot; those behind it get theirs.

    The adapters of the next requests are loaded early, as far as all of them fit.
    """

    _blocking = False

    def __init__(self, inputs: SchedulerInputs) -> None:
        super().__init__(inputs, patience=0.0)
        self._order: ClassOrder[T] = ClassOrder(inputs.classes, inputs.overtaken_requests)

    def _select(self) -> None:
        self._order.pick(self._waiting, self._free_slots, self._admits)
        spare = self._spare_tokens()
        upcoming = self._order.upcoming(self._waiting, max(self._free_slots, PRELOAD))
        for place, request in enumerate(upcoming):
            spare -= self._cache_tokens(request)
            if spare < 0 or not self._start_load(request, upcoming[:place]):
                break

    def _admits(self, request: T) -> bool:
        return self._try_admit(request, reserve=not self._blocking)


class BlockingArrivalOrder(ArrivalOrder[T]):
    """In order of class and arrival. No request overtakes one whose adapter loads (S-LoRA)."""

    _blocking = True
