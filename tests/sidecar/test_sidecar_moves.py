"""From the workers' bins to planned counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shapeshift.sidecar.policy.moves import Action, at_start, batches, moves, under_load
from tests.sidecar.fakes import EDGES, front


def names(count: int, start: int = 0) -> list[str]:
    return [f"enc_w{number:02d}" for number in range(start, start + count)]


def able_workers(current: dict[str, int], left_out: set[str], length: int) -> int:
    return sum(bin_ >= length for worker, bin_ in current.items() if worker not in left_out)


@pytest.mark.parametrize("seed", range(60))
def test_fewest_changes_and_never_fewer_workers_for_any_length(seed: int) -> None:
    source = random.Random(seed)
    current = {name: source.choice(EDGES) for name in names(source.randint(1, 10))}
    counts = [source.randint(0, 4) for _ in EDGES]
    counts[-1] += 1
    spare = names(20, start=30)
    outstanding = {name: source.randint(0, 9) for name in current}
    planned = moves(front(), current, counts, spare, outstanding)

    lacking = {edge: count - list(current.values()).count(edge) for edge, count in zip(EDGES, counts, strict=True)}
    missing = sum(lacking.values())
    kinds = Counter(action.kind for action in planned)
    assert kinds["load"] == max(missing, 0)
    assert kinds["unload"] == max(-missing, 0)
    assert len(planned) == max(
        sum(max(value, 0) for value in lacking.values()), sum(max(-value, 0) for value in lacking.values())
    )

    now, size = dict(current), source.randint(1, 3)
    least = {edge: min(able_workers(current, set(), edge), sum(counts[index:])) for index, edge in enumerate(EDGES)}
    for batch in batches(planned, size):
        assert 1 <= len(batch) <= size
        changing = {action.worker for action in batch}
        for edge in EDGES:
            assert able_workers(now, changing, edge) >= least[edge] - len(changing)
        for action in batch:
            if action.kind == "unload":
                del now[action.worker]
            else:
                now[action.worker] = action.bin
        for edge in EDGES:
            assert able_workers(now, set(), edge) >= least[edge]
    assert [list(now.values()).count(edge) for edge in EDGES] == counts


def test_the_least_busy_worker_of_a_bin_is_released() -> None:
    current = dict.fromkeys(names(3), 512)
    (action,) = moves(front(), current, (0, 0, 2), [], {"enc_w00": 4, "enc_w01": 1, "enc_w02": 3})
    assert action == Action("unload", "enc_w01", before=512)


def test_too_few_spare_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="spare: got 1 workers; must be at least 2"):
        moves(front(), {}, (1, 0, 1), ["enc_w00"], {})
    with pytest.raises(ValueError, match="spare: got 0 workers; must be at least 1"):
        moves(front(placement="resident"), {}, (1,), [], {})


def test_actions_as_text() -> None:
    assert str(Action("load", "enc_w00", 64)) == "load enc_w00 with 64"
    assert str(Action("load", "enc_w00")) == "load enc_w00 with all bins"
    assert str(Action("change", "enc_w00", 64, 512)) == "enc_w00 512 -> 64"
    assert str(Action("unload", "enc_w00")) == "unload enc_w00"


def test_more_workers_are_changed_at_once_where_there_are_more() -> None:
    assert [under_load(workers) for workers in (1, 8, 40)] == [1, 1, 5]
    assert [at_start(nodes) for nodes in (0, 1, 3)] == [4, 4, 12]
