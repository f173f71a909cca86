"""Dispatch: the paper's two figures, the rules one by one, and the running structure against the single decision."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shapeshift.polymorph.policy.dispatch import SCORED, Instance, Level, Rules, choose
from shapeshift.polymorph.policy.dispatcher import Dispatcher

PAPER = json.loads((Path(__file__).parent / "paper_dispatch.json").read_text())


def levels_of(described: list[dict[str, Any]]) -> list[Level[Any]]:
    return [
        Level(level["max_length"], tuple(Instance(**one) for one in level["instances"]), level.get("service_ms"))
        for level in described
    ]


def running(levels: list[Level[Any]], rules: Rules) -> Dispatcher[Any]:
    made: Dispatcher[Any] = Dispatcher(
        [level.max_length for level in levels], [level.service_ms or 1.0 for level in levels], rules
    )
    for index, level in enumerate(levels):
        for one in level.instances:
            made.add(index, one.id, one.capacity, one.outstanding)
    return made


def fig4(rules: Rules) -> list[int]:
    """Outstanding requests of the four GPUs in the end."""
    levels = levels_of(PAPER["fig4"]["levels"])
    made = running(levels, rules)
    for length in PAPER["fig4"]["lengths"]:
        made.dispatch(length)
    made.check_integrity()
    return [made.remove(gpu) for gpu in range(4)]


@pytest.mark.parametrize("peek", [3, 6])
def test_fig4_fails_with_the_printed_parameters(peek: int) -> None:
    # 3 of the 8 short requests go to GPU2 and 5 to GPU3, which then holds 25 of 20.
    assert fig4(Rules("multilevel", 0.85, 0.9, peek)) == [78, 79, 31, 25]


@pytest.mark.parametrize(("threshold", "decay"), [(1.0, 0.9), (0.975, 0.95), (0.9, 1.0)])
def test_fig4_holds_with_other_parameters(threshold: float, decay: float) -> None:
    ended = fig4(Rules("multilevel", threshold, decay, 6))
    assert all(outstanding <= capacity for outstanding, capacity in zip(ended, (80, 80, 40, 20), strict=True))


def test_fig4_of_the_two_alternatives() -> None:
    # Least padding: five short requests over capacity. Least load: all eight to GPU3, eight late ones over capacity.
    assert fig4(Rules("intra_group")) == [83, 82, 28, 20]
    assert fig4(Rules("inter_group"))[3] > 20


def test_fig5() -> None:
    levels = levels_of(PAPER["fig5"]["levels"])
    assert choose(PAPER["fig5"]["length"], levels, Rules("multilevel", 0.85, 0.9, 3)) == (2, 2)


def level(max_length: int, *outstanding: int, service_ms: float | None = 1.0, capacity: float = 10) -> Level[int]:
    found = (Instance(max_length + index, count, capacity) for index, count in enumerate(outstanding))
    return Level(max_length, tuple(found), service_ms)


def test_the_threshold_is_strict_and_decays() -> None:
    levels = [level(100, 8), level(200, 4), level(300, 0)]
    assert choose(1, levels, Rules("multilevel", threshold=0.81, decay=0.5)) == (0, 100)
    assert choose(1, levels, Rules("multilevel", threshold=0.8, decay=0.625)) == (1, 200)
    assert choose(1, levels, Rules("multilevel", threshold=0.8, decay=0.5)) == (2, 300)


def test_multilevel_falls_back_to_the_first_candidate() -> None:
    assert choose(1, [level(100, 10), level(200, 10)], Rules("multilevel")) == (0, 100)


def test_earliest_finish() -> None:
    assert choose(1, [level(100, 3, service_ms=2.0), level(200, 2, service_ms=2.5)], Rules()) == (1, 200)
    assert choose(1, [level(100, 3, service_ms=2.0), level(200, 1, service_ms=4.0)], Rules()) == (0, 100)
    with pytest.raises(ValueError, match="service_ms"):
        choose(1, [level(100, 3, service_ms=None)], Rules())


def test_inter_group_and_intra_group() -> None:
    levels = [level(100, 4), level(200, 3), level(300, 3)]
    assert choose(1, levels, Rules("inter_group")) == (1, 200)
    assert choose(1, levels, Rules("intra_group")) == (0, 100)


def test_heads_candidates_and_peek() -> None:
    levels = [level(100, 5), level(200), level(300, 7, 6, 6), level(400, 0)]
    assert choose(100, levels, Rules("intra_group")) == (0, 100)
    assert choose(101, levels, Rules("intra_group")) == (2, 301)
    assert choose(400, levels, Rules("intra_group")) == (3, 400)
    assert choose(401, levels, Rules("intra_group")) is None
    assert choose(150, [level(200)], Rules("intra_group")) is None
    # Level 200 has no instance and does not use up a look.
    assert choose(1, levels, Rules("inter_group", peek=2)) == (0, 100)
    assert choose(1, levels, Rules("inter_group", peek=3)) == (3, 400)


@pytest.mark.parametrize("algorithm", SCORED)
@pytest.mark.parametrize("seed", range(25))
def test_the_running_structure_decides_as_the_single_decision(algorithm: str, seed: int) -> None:
    rng = random.Random(seed)
    ids: list[Any] = list(range(40)) if seed % 2 else [f"w{index:02d}" for index in range(40)]
    rng.shuffle(ids)
    rules = Rules(algorithm, rng.choice([0.3, 0.85, 1.0]), rng.choice([0.5, 0.9, 1.0]), rng.randint(1, 5))
    lengths = sorted(rng.sample(range(1, 512), rng.randint(1, 7)))
    services = [rng.choice([1.0, 2.0, 2.5, 4.0]) for _ in lengths]
    made: Dispatcher[Any] = Dispatcher(lengths, services, rules)
    mirror: dict[Any, list[Any]] = {}
    decided = 0
    for _ in range(400):
        action = rng.random()
        if action < 0.08 and ids:
            one, place, count = ids.pop(), rng.randrange(len(lengths)), rng.randint(0, 3)
            mirror[one] = [place, count, rng.choice([4, 8, 8.5])]
            made.add(place, one, mirror[one][2], count)
        elif action < 0.12 and mirror:
            one = rng.choice(list(mirror))
            assert made.remove(one) == mirror.pop(one)[1]
            ids.append(one)
        elif action < 0.5:
            busy = [one for one, (_, count, _) in mirror.items() if count]
            if busy:
                one = rng.choice(busy)
                mirror[one][1] -= 1
                made.finish(one)
        else:
            length = rng.randint(1, lengths[-1] + 10)
            levels = [
                Level(end, tuple(Instance(o, c, m) for o, (p, c, m) in mirror.items() if p == place), services[place])
                for place, end in enumerate(lengths)
            ]
            expected = choose(length, levels, rules)
            assert made.dispatch(length) == expected
            if expected:
                mirror[expected[1]][1] += 1
                decided += 1
        made.check_integrity()
    assert decided


def test_memory_stays_bounded() -> None:
    made = running([level(100, 0, 0, 0)], Rules())
    for _ in range(3000):
        chosen = [made.dispatch(1) for _ in range(3)]
        for one in chosen:
            assert one
            made.finish(one[1])
    assert len(made._queues[0].heap) <= 4 * 3 + 65
    made.check_integrity()


def test_misuse_is_refused() -> None:
    made = running([level(100, 0)], Rules())
    with pytest.raises(ValueError, match="no outstanding"):
        made.finish(100)
    with pytest.raises(ValueError, match="already"):
        made.add(0, 100, 5.0)
    with pytest.raises(ValueError, match="capacity"):
        made.add(0, 101, 0.0)
    with pytest.raises(KeyError):
        made.finish(7)
    with pytest.raises(KeyError):
        made.remove(7)
    assert made.remove(100) == 0
    assert made.dispatch(1) is None
    for wrong in ({"algorithm": "best"}, {"threshold": -1.0}, {"decay": -1.0}, {"peek": 0}):
        with pytest.raises(ValueError, match="got"):
            Rules(**wrong)
    with pytest.raises(ValueError, match="ascending"):
        Dispatcher([2, 2], [1.0, 1.0], Rules())
    with pytest.raises(ValueError, match="services_ms"):
        Dispatcher([2, 3], [1.0], Rules())
