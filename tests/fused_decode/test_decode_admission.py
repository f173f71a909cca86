from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed


@dataclass(eq=False)
class Waiting:
    number: int
    slo_class: str | None = None
    arrived: float = 0.0


def queue(requests: int = 100) -> FirstComeFirstServed[Waiting]:
    return FirstComeFirstServed(requests, ("interactive", "*", "batch"))


def test_first_come_first_served() -> None:
    made = queue()
    waiting = [Waiting(1) for _ in range(10)]
    for request in waiting:
        made.submit(request)
    assert made.admit(0) == []
    assert made.admit(3) == waiting[:3]
    assert len(made) == 7
    assert made.withdraw(waiting[4]) and not made.withdraw(waiting[4]) and not made.withdraw(waiting[0])
    assert made.admit(100) == [waiting[3], *waiting[5:]]
    assert made.admit(1) == [] and len(made) == 0


def test_a_request_beyond_a_limit_is_refused_and_not_counted() -> None:
    made = queue(requests=2)
    made.submit(Waiting(6))
    made.refuse_when_full()
    made.submit(Waiting(4))
    with pytest.raises(OverloadedError, match="queue_requests: 2 requests wait, 1 more would exceed 2; retry later"):
        made.submit(Waiting(0))
    with pytest.raises(OverloadedError, match="queue_requests"):
        made.refuse_when_full()
    assert len(made.admit(9)) == 2
    made.submit(Waiting(1))


def test_an_urgent_request_takes_the_place_of_the_last_one_that_is_less_urgent() -> None:
    made = queue(requests=3)
    batch, plain, urgent = [Waiting(1, "batch"), Waiting(2, "batch")], Waiting(3), Waiting(4, "interactive")
    assert [made.submit(request) for request in (*batch, plain)] == [None] * 3
    made.refuse_when_full("interactive")
    assert made.submit(urgent) is batch[1]
    assert made.submit(Waiting(5)) is batch[0]
    for full in (None, "batch", "other"):
        with pytest.raises(OverloadedError, match="queue_requests: 3 requests wait"):
            made.refuse_when_full(full)
    assert [request.number for request in made.admit(9)] == [4, 3, 5]


def test_a_preempted_request_gets_its_old_place_back() -> None:
    made = queue()
    waiting = [Waiting(number, name, float(number)) for number, name in enumerate((None, None, None, "batch"))]
    for request in waiting:
        made.submit(request)
    assert made.admit(2) == waiting[:2]
    made.submit(Waiting(4, "interactive", 4.0))
    for request in (waiting[1], waiting[0]):
        made.preempted(request)
    assert [request.number for request in made.admit(9)] == [4, 0, 1, 2, 3]


def test_close_returns_waiting_requests_and_refuses_new_ones() -> None:
    made = queue()
    waiting = [Waiting(1), Waiting(2)]
    for request in waiting:
        made.submit(request)
    assert made.close() == waiting
    for refused in (made.refuse_when_full, lambda: made.submit(Waiting(1))):
        with pytest.raises(OverloadedError, match="being unloaded"):
            refused()


def test_many_threads() -> None:
    made = queue(requests=10**6)
    got: list[Waiting] = []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set() or len(made):
            got.extend(made.admit(5))

    taker = threading.Thread(target=take)
    taker.start()

    def submit_many() -> None:
        for _ in range(500):
            made.submit(Waiting(3))

    senders = [threading.Thread(target=submit_many) for _ in range(4)]
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    stop.set()
    taker.join(30)
    assert len(got) == len(set(map(id, got))) == 2000
