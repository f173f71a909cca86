"""What a profile says of calls: times by length, the size of a pack, the longest call, the slots of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.execution import engine_set
from shapeshift.engines.execution.engine_set import MAX_ROWS, EngineSet, cost_curve, first_and_rest
from shapeshift.engines.manifest import EngineEntry, Latency
from shapeshift.engines.policy.packs import expected_ms
from shapeshift.errors import EngineError


def point(tokens: int, best_ms: float) -> Latency:
    return Latency(tokens, 1, 2 * best_ms, 3 * best_ms, best_ms)


def entry(tokens: int | None, *points: Latency, rows: int | None = None) -> EngineEntry:
    return EngineEntry("", tokens, rows, 0.0, 1.0, points)


def made(*engines: EngineEntry, max_tokens: int = 8, **more: Any) -> Any:
    return SimpleNamespace(
        engines=engines,
        max_tokens=max_tokens,
        pack_tokens=max([max_tokens, *(one.tokens or 0 for one in engines)]),
        position_offset=0,
        type_stride=0,
        packs_rows=True,
        **more,
    )


STATIC = entry(4, point(1, 1.0), point(4, 5.0), rows=4)
DYNAMIC = entry(None, point(8, 10.0), point(2, 4.0))


def test_the_expected_time_is_weighed_by_the_lengths() -> None:
    # The time of no token does not count.
    assert expected_ms([99.0, 1.0, 2.0, 4.0], [1.0, 2.0, 1.0]) == pytest.approx((1 + 4 + 4) / 4)
    assert expected_ms([99.0, 1.0, 2.0], [0.0, 3.0]) == 2.0


def test_a_static_engine_takes_its_longest_time_up_to_its_length() -> None:
    assert cost_curve(STATIC, 6).tolist() == [5.0] * 5 + [np.inf] * 2


def test_the_dynamic_engine_takes_what_lies_between_the_measured_times() -> None:
    assert cost_curve(DYNAMIC, 8).tolist() == [4.0, 4.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]


def test_beyond_its_profile_a_token_costs_what_it_does_at_the_end() -> None:
    assert cost_curve(DYNAMIC, 16)[[8, 12, 16]].tolist() == [10.0, 15.0, 20.0]


def test_of_all_engines_the_fastest_counts() -> None:
    assert engine_set.best_curve(made(STATIC, DYNAMIC)).tolist() == [4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 8.0, 9.0, 10.0]


def test_the_longest_call_is_a_99th_percentile_in_seconds() -> None:
    assert engine_set.longest_call_s(made(STATIC, DYNAMIC)) == 0.03
    assert engine_set.longest_call_s(made(entry(None))) == 0.0


def test_a_pack_is_the_smallest_whose_time_per_token_is_near_the_best() -> None:
    # Half a short row is empty: 36 - 12 tokens in 24 ms, 60 - 12 in 40 ms, 112 - 12 in 76 ms.
    points = (point(24, 0.1), point(36, 24.0), point(60, 40.0), point(112, 76.0))
    assert engine_set.efficient_tokens(made(entry(None, *points), max_tokens=512)) == 60


def test_a_time_at_the_limit_is_near_enough() -> None:
    points = (point(44, 32 * 1.1), point(112, 100.0))
    assert engine_set.efficient_tokens(made(entry(None, *points), max_tokens=512)) == 44


def test_without_longer_packs_in_the_profile_a_pack_is_the_longest_text() -> None:
    assert engine_set.efficient_tokens(made(entry(None, point(24, 1.0)), max_tokens=512)) == 512


@pytest.mark.parametrize(
    ("rows", "packs", "most"),
    [((4, 2), True, 4), ((4, None), True, MAX_ROWS), ((99, 1), True, 99), ((4, 2), False, 1)],
)
def test_the_rows_of_a_pack_are_bounded(rows: tuple[int | None, ...], packs: bool, most: int) -> None:
    found = made(*(entry(8, rows=own) for own in rows))
    found.packs_rows = packs
    assert engine_set.max_rows(found) == most


@pytest.mark.parametrize(
    ("tokens", "packs", "slots"),
    [
        (3, True, 1),
        (4, True, 1),
        (8, True, 2),
        (64, True, 16),
        (68, True, 16),
        (512, True, 16),
        (4096, True, 512),
        (512, False, 1),
    ],
)
def test_an_engine_has_a_slot_for_every_four_tokens_and_a_long_pack_for_every_eight(
    tokens: int, packs: bool, slots: int
) -> None:
    assert engine_set.row_slots(tokens, packs, 512) == slots


class Named:
    """An engine that is only chosen."""

    def __init__(self, tokens: int | None, rows: int | None) -> None:
        self.tokens, self.rows = tokens, rows


def chosen(engines: EngineSet, tokens: int, rows: int) -> int | None:
    return engines.choose(tokens, rows).tokens


def test_a_pack_takes_the_fastest_engine_that_has_room_for_its_rows() -> None:
    engines = EngineSet(made())
    engines.add(Named(4, 2), STATIC)  # type: ignore[arg-type]
    engines.add(Named(None, None), DYNAMIC)  # type: ignore[arg-type]
    # Up to two tokens the dynamic engine is faster, of three and four it is not.
    assert [chosen(engines, tokens, 1) for tokens in (2, 3, 4, 5, 8)] == [None, 4, 4, None, None]
    assert (chosen(engines, 4, 2), chosen(engines, 4, 3)) == (4, None)
    assert engines.loaded == ["4", "dynamic"]


def test_without_an_engine_that_is_large_enough_a_pack_is_an_error() -> None:
    engines = EngineSet(made())
    engines.add(Named(4, 2), STATIC)  # type: ignore[arg-type]
    assert chosen(engines, 4, 2) == 4
    for tokens, rows in ((5, 1), (4, 3), (9, 1)):
        with pytest.raises(EngineError, match=f"^no engine for {rows} rows of {tokens} tokens$"):
            engines.choose(tokens, rows)


def test_a_pack_beyond_the_longest_text_takes_an_engine_that_has_room() -> None:
    engines = EngineSet(made())
    engines.add(Named(16, 4), entry(16, point(16, 9.0), rows=4))  # type: ignore[arg-type]
    engines.add(Named(12, 4), entry(12, point(12, 9.5), rows=4))  # type: ignore[arg-type]
    assert [chosen(engines, tokens, 1) for tokens in (8, 9, 12, 13)] == [16, 12, 12, 16]


def test_a_pack_may_be_longer_than_any_text_where_there_is_an_engine_for_it() -> None:
    # A token of the long pack is cheaper: 32 in 16 ms, where 8 take 9.
    longer = entry(32, point(32, 16.0), rows=8)
    profile = made(STATIC, DYNAMIC, longer)
    engines = EngineSet(profile)
    engines.add(Named(None, None), DYNAMIC)  # type: ignore[arg-type]
    engines.add(Named(32, 8), longer)  # type: ignore[arg-type]
    assert [chosen(engines, tokens, 1) for tokens in (8, 12, 14, 32)] == [None, None, 32, 32]
    assert engine_set.best_curve(profile)[[8, 32]].tolist() == [10.0, 16.0]
    assert engine_set.efficient_tokens(profile) == 32 and engine_set.max_rows(profile) == MAX_ROWS


def test_the_first_engine_is_the_dynamic_one_or_the_longest() -> None:
    longest = entry(8)
    assert first_and_rest(made(STATIC, DYNAMIC, longest)) == (DYNAMIC, [STATIC, longest])
    assert first_and_rest(made(STATIC, longest)) == (longest, [STATIC])
