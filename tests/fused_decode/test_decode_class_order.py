"""Which class of waiting requests goes first, and how often one may be overtaken."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving.bounds import ClassOrder, next_in_order
from tests.fused_decode.fronts import MakeFront, answer_of, ask
from tests.fused_decode.toy import ToyRuntime
from tests.waiting import wait_for


@dataclass(eq=False)
class Waiting:
    """A request, equal only to itself."""

    number: int
    slo_class: str | None


def test_urgent_requests_first_and_then_in_order_of_arrival() -> None:
    assert next_in_order([1, 2, 0, 1, 0], [0] * 5, 5, 99) == [2, 4, 0, 3, 1]
    assert next_in_order([1, 1, 1], [0] * 3, 2, 99) == [0, 1]
    assert next_in_order([], [], 3, 99) == []


def test_one_that_was_overtaken_too_often_goes_first() -> None:
    assert next_in_order([1, 0, 0, 0], [0] * 4, 4, 2) == [1, 2, 0, 3]
    assert next_in_order([1, 0, 0], [1, 0, 0], 2, 1) == [0, 1]
    assert next_in_order([2, 1, 0], [0] * 3, 3, 0) == [0, 1, 2]


@pytest.mark.parametrize("most", [0, 1, 5])
def test_no_request_is_overtaken_more_often(most: int) -> None:
    rng = random.Random(most)
    order: ClassOrder[Any] = ClassOrder(("interactive", "*", "batch"), most)
    waiting: list[Any] = []
    gone: list[Any] = []
    for number in range(600):
        waiting.append(Waiting(number=number, slo_class=rng.choice(["interactive", None, "unknown", "batch"])))
        if rng.random() < 0.5:
            picked = order.pick(waiting, rng.randint(0, 3), lambda one: rng.random() < 0.8)
            gone += picked
            waiting = [one for one in waiting if one not in picked]
        if waiting and rng.random() < 0.05:
            waiting.remove(rng.choice(waiting))
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


@pytest.mark.parametrize("classes", ["interactive", "*,*", "a,a,*", ""])
def test_invalid_classes_are_refused(classes: str) -> None:
    with pytest.raises(InvalidInputError, match="slo_classes: got "):
        FusedDecodeSettings("x", slo_classes=classes)
