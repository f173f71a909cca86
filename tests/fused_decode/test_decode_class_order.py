"""Which class of waiting requests goes first, and how often one may be overtaken."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving.bounds import ClassQueue, SloClasses
from shapeshift.serving.metrics import Counter
from tests.fused_decode.fronts import MakeFront, answer_of, ask
from tests.fused_decode.toy import ToyRuntime
from tests.waiting import wait_for


@dataclass(eq=False)
class Waiting:
    """A request, equal only to itself."""

    number: int
    slo_class: str | None
    arrived: float = 0.0


CLASSES = ("interactive", "*", "batch")


def order_of(ranks: list[int], most: int) -> list[int]:
    """How requests of these classes go, by the order in which they came."""
    queue: ClassQueue[Waiting] = ClassQueue(SloClasses(CLASSES), most)
    for number, rank in enumerate(ranks):
        queue.add(Waiting(number, CLASSES[rank]))
    going = [request.number for request in queue]
    assert [request.number for request in queue.take(len(ranks))] == going and not len(queue)
    return going


def test_urgent_requests_first_and_then_in_order_of_arrival() -> None:
    assert order_of([1, 2, 0, 1, 0], 99) == [2, 4, 0, 3, 1]
    assert order_of([1, 1, 1], 99) == [0, 1, 2]
    assert order_of([], 99) == []


def test_one_that_was_overtaken_too_often_goes_first() -> None:
    assert order_of([1, 0, 0, 0], 2) == [1, 2, 0, 3]
    assert order_of([2, 1, 0, 0], 1) == [2, 0, 1, 3]
    assert order_of([2, 1, 0], 0) == [0, 1, 2]


def test_it_is_counted_what_each_class_does() -> None:
    classes = SloClasses(CLASSES)
    queue: ClassQueue[Waiting] = ClassQueue(classes)
    requests = [Waiting(number, name) for number, name in enumerate(("batch", "interactive", None, "batch"))]
    for request in requests:
        queue.add(request)
    assert queue.take(2) == requests[1:3] and queue.remove(requests[3]) and not queue.remove(requests[3])
    assert (classes.waiting, classes.started, classes.overtaken) == ([0, 0, 1], [1, 1, 0], [0, 0, 2])
    assert all(seconds > 0 for seconds in classes.waited_s[:2])
    exported = {
        (metric.name, *metric.labels.values()): metric.value
        for metric in classes.metrics()
        if isinstance(metric, Counter)
    }
    assert exported["shapeshift_class_started_total", "interactive"] == 1
    assert exported["shapeshift_class_overtaken_total", "batch"] == exported["shapeshift_overtakes_total",] == 2


@pytest.mark.parametrize("most", [0, 1, 5])
def test_no_request_is_overtaken_more_often(most: int) -> None:
    rng = random.Random(most)
    queue: ClassQueue[Waiting] = ClassQueue(SloClasses(CLASSES), most)
    gone: list[Waiting] = []
    for number in range(600):
        queue.add(Waiting(number, rng.choice(["interactive", None, "unknown", "batch"])))
        if rng.random() < 0.5:
            gone += queue.take(rng.randint(0, 3), lambda one: rng.random() < 0.8)
        if len(queue) and rng.random() < 0.05:
            queue.remove(rng.choice(list(queue)))
    overtaken = [sum(other.number > one.number for other in gone[:place]) for place, one in enumerate(gone)]
    assert max(overtaken) == most


def test_requests_get_slots_by_their_classes(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front(max_concurrency=1)
    first = ask(request_id="first", max_tokens=1)
    front.execute([first, *(ask(max_tokens=50) for _ in range(2))])
    assert toy.entered.acquire(timeout=30)
    admitted: list[str] = []
    allocate = front.loop.slots.allocate

    def noted(request: Any) -> int:
        admitted.append(request.id)
        return allocate(request)

    front.loop.slots.allocate = noted  # type: ignore[method-assign]
    classes = {"batch": "batch", "plain": None, "other": "other", "urgent": "interactive"}
    requests = [
        ask(request_id=name, max_tokens=1, parameters={} if own is None else {"slo_class": own})
        for name, own in classes.items()
    ]
    front.execute(requests)
    toy.open.set()
    for request in requests:
        answer_of(request)
    wait_for(lambda: not front.live)
    names = [name for name in admitted if name in classes]
    assert names.index("urgent") < names.index("plain") < names.index("other") < names.index("batch")


def test_in_a_full_queue_the_least_urgent_request_makes_room(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front(max_concurrency=1, queue_requests=2)
    front.execute([runs := ask(max_tokens=1)])
    assert toy.entered.acquire(timeout=30)
    names = ("batch", "batch", "interactive", "batch")
    requests = [ask(max_tokens=1, parameters={"slo_class": name}) for name in names]
    front.execute(requests)
    toy.open.set()
    for served in (runs, requests[0], requests[2]):
        answer_of(served)
    assert "slo_class took the place of this one; retry later" in requests[1].refusal()[1]
    assert "2 requests wait, 1 more would exceed 2; retry later" in requests[3].refusal()[1]


@pytest.mark.parametrize("classes", ["interactive", "*,*", "a,a,*", ""])
def test_invalid_classes_are_refused(classes: str) -> None:
    with pytest.raises(InvalidInputError, match="slo_classes: got "):
        FusedDecodeSettings("x", slo_classes=classes)
