from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.execution.request import BoundedQueue, Row, TextRequest
from shapeshift.errors import OverloadedError
from shapeshift.serving.bounds import OVERTAKEN, SloClasses


class Item(Row):
    def __init__(self, tokens: int, name: Any = None, slo_class: str | None = None) -> None:
        super().__init__(TextRequest([], lambda ended: None, slo_class=slo_class), 0, np.zeros(tokens, np.int64))
        self.name = name


def take_one(lengths: Iterable[int], waiting: int) -> int:
    return 1


def take_all(lengths: Iterable[int], waiting: int) -> int:
    return waiting


def items(*tokens: int) -> list[Item]:
    return [Item(count) for count in tokens]


def test_first_in_first_out() -> None:
    queue = BoundedQueue(10)
    first, second = items(3, 4)
    queue.put([first])
    queue.put([second])
    assert len(queue) == 2
    assert queue.take(take_one) == [first]
    assert queue.take(take_all) == [second]
    assert len(queue) == 0
    queue.check_integrity()


def test_decide_sees_what_waits() -> None:
    queue = BoundedQueue(10)
    queue.put(items(3, 4, 5))
    seen = []

    def decide(lengths: Iterable[int], waiting: int) -> int:
        seen.append((list(lengths), waiting))
        return 2

    assert [item.tokens for item in queue.take(decide)] == [3, 4]
    assert [item.tokens for item in queue.take(take_all)] == [5]
    assert seen == [([3, 4, 5], 3)]


def test_rows_are_limited() -> None:
    queue = BoundedQueue(3)
    queue.put(items(1, 1))
    with pytest.raises(OverloadedError, match="queue_rows: 2 rows wait, 2 more would exceed 3; retry later"):
        queue.put(items(1, 1))
    assert len(queue) == 2
    queue.put(items(1))
    with pytest.raises(OverloadedError, match="3 rows wait, 1 more would exceed 3"):
        queue.put(items(1))
    queue.check_integrity()


def test_an_empty_queue_takes_anything() -> None:
    queue = BoundedQueue(2)
    queue.put(items(500, 500, 500))
    with pytest.raises(OverloadedError):
        queue.put(items(1))
    assert len(queue.take(take_all)) == 3
    queue.put(items(11))
    queue.check_integrity()


def test_close_returns_what_waits_and_wakes_everyone() -> None:
    queue = BoundedQueue(10)
    taken: list[list[Any]] = []
    consumers = [threading.Thread(target=lambda: taken.append(queue.take(take_one))) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    assert queue.close() == []
    for consumer in consumers:
        consumer.join(30)
        assert not consumer.is_alive()
    assert taken == [[], [], []]
    with pytest.raises(OverloadedError, match="being unloaded; retry elsewhere"):
        queue.put(items(1))
    assert queue.take(take_all) == []


def test_close_hands_back_each_item_once() -> None:
    queue = BoundedQueue(10)
    waiting = items(1, 2)
    queue.put(waiting)
    assert queue.close() == waiting
    assert queue.close() == []
    queue.check_integrity()


def test_the_cost_of_what_waits() -> None:
    queue = BoundedQueue(10, lambda item: 1.5 * item.tokens)
    queue.put(items(2, 4))
    queue.put(items(6))
    assert queue.waiting_ms == pytest.approx(18.0)
    queue.take(take_one)
    assert queue.waiting_ms == pytest.approx(15.0)
    queue.take(take_all)
    assert queue.waiting_ms == 0.0
    queue.put(items(2))
    queue.close()
    assert queue.waiting_ms == 0.0
    queue.check_integrity()


def test_many_producers_and_consumers_lose_and_double_nothing() -> None:
    queue = BoundedQueue(50)
    sent: list[list[Item]] = [[] for _ in range(4)]
    taken: list[list[Any]] = [[] for _ in range(3)]
    refused = [0] * 4

    def produce(number: int) -> None:
        rng = random.Random(number)
        for turn in range(400):
            group = [Item(rng.randint(1, 20), (number, turn, place)) for place in range(rng.randint(1, 5))]
            try:
                queue.put(group)
                sent[number].extend(group)
            except OverloadedError:
                refused[number] += 1

    def consume(number: int) -> None:
        rng = random.Random(100 + number)
        while group := queue.take(lambda lengths, waiting: rng.randint(1, waiting)):
            taken[number].extend(group)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    consumers = [threading.Thread(target=consume, args=(number,)) for number in range(3)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join()
    queue.check_integrity()
    left = queue.close()
    for thread in consumers:
        thread.join()
    received = [item for own in [*taken, left] for item in own]
    assert len(received) == len(set(map(id, received)))
    assert set(map(id, received)) == {id(item) for own in sent for item in own}
    # Each consumer got what it got in the order in which each producer sent it.
    for own in taken:
        for number in range(4):
            order = [item.name for item in own if item.name[0] == number]
            assert order == sorted(order)
    assert len(queue) == 0
    queue.check_integrity()


CLASSES = ("interactive", "*", "batch")


def test_urgent_rows_go_first_and_the_rest_in_order() -> None:
    queue = BoundedQueue(10, classes=SloClasses(CLASSES))
    names = ["batch", None, "interactive", "other", "interactive"]
    rows = [Item(number, slo_class=name) for number, name in enumerate(names, 1)]
    queue.put(rows)
    seen = []

    def decide(lengths: Iterable[int], waiting: int) -> int:
        seen.append(list(lengths))
        return 2

    assert [item.tokens for item in queue.take(decide)] == [3, 5]
    queue.check_integrity()
    assert [item.tokens for item in queue.take(take_all)] == [2, 4, 1]
    assert seen == [[3, 5, 2, 4, 1]]
    assert queue.classes.overtakes == 4
    queue.check_integrity()


def test_a_row_is_overtaken_so_often_and_no_more() -> None:
    queue = BoundedQueue(100, classes=SloClasses(CLASSES))
    late = Item(99, slo_class="batch")
    queue.put([late])
    queue.put([Item(1, slo_class="interactive") for _ in range(60)])
    taken = [queue.take(take_one)[0] for _ in range(61)]
    assert taken.index(late) == OVERTAKEN
    assert queue.classes.overtakes == OVERTAKEN


def test_without_classes_nothing_is_put_in_order() -> None:
    queue = BoundedQueue(500, classes=SloClasses(CLASSES))
    rows = [Item(number) for number in range(1, 400)]
    queue.put(rows)
    assert queue.take(take_all) == rows
    assert queue.classes.overtakes == 0
