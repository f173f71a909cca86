from __future__ import annotations

import numpy as np

from shapeshift.simulate.events import Events


def test_events_come_in_order_of_time_then_of_their_making() -> None:
    events, seen = Events(), list[tuple[float, str]]()

    def note(name: str) -> None:
        seen.append((events.now, name))

    events.at(2.0, note, "late")
    events.at(1.0, note, "first")
    events.at(1.0, note, "second")
    events.run(np.array([0.5, 1.0, 1.0]), lambda index: note(f"arrival {index}"))
    assert seen == [
        (0.5, "arrival 0"),
        (1.0, "arrival 1"),
        (1.0, "arrival 2"),
        (1.0, "first"),
        (1.0, "second"),
        (2.0, "late"),
    ]


def test_what_an_event_adds_at_once_comes_after_what_is_due() -> None:
    events, seen = Events(), list[str]()

    def chain(name: str) -> None:
        seen.append(name)
        if name == "one":
            events.at(events.now, chain, "three")

    events.at(1.0, chain, "one")
    events.at(1.0, chain, "two")
    events.run(np.zeros(0), lambda index: None)
    assert seen == ["one", "two", "three"]


def test_periods_end_with_the_arrivals() -> None:
    events, seen, shown = Events(), list[float](), list[tuple[int, int]]()
    events.every(2.0, lambda: seen.append(events.now))
    events.run(np.array([1.0, 7.0]), lambda index: None, lambda done, total: shown.append((done, total)))
    assert seen == [2.0, 4.0, 6.0]
    assert shown[-1] == (2, 2)
