"""Schedulers in order of arrival: the default, and S-LoRA's, in which a load blocks the requests behind it."""

from __future__ import annotations

import itertools

from shapeshift.adapter_cache.policy.admission_base import AdmissionBase, T
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs

PRELOAD = 2
"""Requests whose adapters are loaded while no slot is free, if the memory has space that is not in slots."""


class ArrivalOrder(AdmissionBase[T]):
    """In order of arrival. A request whose adapter loads keeps its slot, and the requests behind it get theirs.

    The adapters of the next requests are loaded early, as far as all of them fit.
    """

    _blocking = False

    def __init__(self, inputs: SchedulerInputs) -> None:
        super().__init__(inputs, patience=0.0)

    def _select(self) -> None:
        while self._free_slots > 0 and self._waiting:
            if not self._try_admit(next(iter(self._waiting)), reserve=not self._blocking):
                break
        spare = self._spare_tokens()
        for request in itertools.islice(self._waiting, max(self._free_slots, PRELOAD)):
            spare -= self._cache_tokens(request)
            if spare < 0 or not self._start_load(request):
                break


class BlockingArrivalOrder(ArrivalOrder[T]):
    """In order of arrival. No request overtakes one whose adapter loads (S-LoRA)."""

    _blocking = True
