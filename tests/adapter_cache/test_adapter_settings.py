"""The ranges of the parameters of adapters."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.adapter_cache.settings import AdapterCacheSettings, require_one_rank
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.limits import Limits, cases, require_limit

LEAST: Limits = {"max_rank": (1, 0), "adapter_mb": (1, 0), "host_mb": (0, -1)}
MOST: Limits = {"max_rank": (4096, 4097), "adapter_mb": (1048576, 1048577), "host_mb": (1048576, 1048577)}


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(AdapterCacheSettings, name, within, beyond)


def test_unless_it_is_stated_adapters_are_cached_and_not_prefetched() -> None:
    made = AdapterCacheSettings()
    assert (made.prefetch, made.eviction, made.predictor_weights) == (False, "gdsf", "")


@pytest.mark.parametrize(("name", "value"), [("eviction", "fifo"), ("scheduler", "edf")])
def test_an_unknown_policy_is_refused(name: str, value: str) -> None:
    stated: dict[str, Any] = {name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}: got '{value}'"):
        AdapterCacheSettings(**stated)


def test_adapters_are_in_one_process() -> None:
    require_one_rank(FusedDecodeSettings("a"))
    with pytest.raises(InvalidInputError, match="^tensor_parallel_size: got 2; 1 for a model with adapters"):
        require_one_rank(FusedDecodeSettings("a", tensor_parallel_size=2))
