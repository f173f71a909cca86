"""The compiled inner steps of `allocate_exact`.

All compiled code of the allocation is in this file: its disk cache is renewed when this file changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.jit import njit
from shapeshift.polymorph.policy.curves import AFFINE, CLAMPED, QUEUE

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@njit("f8(i8, f8[::1], f8)")
def latency(kind: int, values: Floats, load: float) -> float:
    """The curve that `curves.encode` wrote as `kind` and `values`, at one workload."""
    if kind == AFFINE:
        return float(values[0] * (load + 1.0) / 2.0)
    if kind == CLAMPED:
        return float(values[0] * (max(load, 1.0) + 1.0) / 2.0)
    if kind == QUEUE:
        share = load / values[1]
        queue = min(share, values[2])
        return float(values[0] * (1.0 + queue / (2.0 * (1.0 - queue)) + values[3] * max(share - values[2], 0.0)))
    last = len(values) - 2
    if load <= 1.0 or last < 0:
        return float(values[0])
    left = int(min(load - 1.0, last))
    return float(values[left] + (load - 1.0 - left) * (values[left + 1] - values[left]))


@njit("f8[::1](f8[::1], f8[::1])")
def min_plus(head: Floats, tail: Floats) -> Floats:
    """out[t] = min over k of head[k] + tail[t - k]; all of one length."""
    out = np.empty(len(head))
    for total in range(len(head)):
        least = np.inf
        for k in range(total + 1):
            least = min(least, head[k] + tail[total - k])
        out[total] = least
    return out


@njit()
def _order(keys: Floats, ties: Floats, places: Integers, low: int, high: int) -> None:
    # Shell sort of places[low:high] by keys, then ties; numba's own sort takes seconds to compile.
    gap = 1
    while 3 * gap < high - low:
        gap = 3 * gap + 1
    while gap:
        for start in range(low + gap, high):
            place = places[start]
            at = start
            while at - gap >= low:
                other = places[at - gap]
                if keys[other] < keys[place] or (keys[other] == keys[place] and ties[other] <= ties[place]):
                    break
                places[at] = other
                at -= gap
            places[at] = place
        gap //= 3


@njit()
def _reach(
    first: Integers,
    left: Floats,
    cost: Floats,
    demand: float,
    capacity: float,
    lower: int,
    kind: int,
    values: Floats,
    to_go: Floats,
    ceiling: float,
) -> tuple[Integers, Integers, Floats, Floats, Floats, Integers]:
    # The successors of every state: slack, parent, left and cost of those with requests left; then, by slack, cost
    # and parent of the best state without requests left.
    slack = len(first) - 2
    full = capacity * latency(kind, values, capacity)
    limit, count = 0, 0
    for state in range(len(left)):
        limit += max(int((left[state] + demand) / capacity) + 2 - lower, 0)
    some_slack, some_parent = np.empty(limit, np.int64), np.empty(limit, np.int64)
    some_left, some_cost = np.empty(limit), np.empty(limit)
    done_cost, done_parent = np.full(slack + 1, np.inf), np.full(slack + 1, -1, np.int64)
    for spent in range(slack + 1):
        most = lower + slack - spent
        for state in range(first[spent], first[spent + 1]):
            todo = left[state] + demand
            workers = lower
            while workers <= most and workers * capacity < todo:
                now = spent + workers - lower
                total = cost[state]
                if workers:
                    total += workers * full
                if total + to_go[now] <= ceiling:
                    some_slack[count], some_parent[count] = now, state
                    some_left[count], some_cost[count] = todo - workers * capacity, total
                    count += 1
                workers += 1
            for enough in range(workers, most + 1):
                now = spent + enough - lower
                total = cost[state]
                if todo > 0.0:
                    total += todo * latency(kind, values, todo / enough)
                if total < done_cost[now]:
                    done_cost[now], done_parent[now] = total, state
    return some_slack[:count], some_parent, some_left, some_cost, done_cost, done_parent


@njit(
    "Tuple((i8[::1], f8[::1], f8[::1], i8[::1]))(i8[::1], f8[::1], f8[::1], f8, f8, i8, i8, f8[::1], f8[::1], f8, b1)"
)
def advance(
    first: Integers,
    left: Floats,
    cost: Floats,
    demand: float,
    capacity: float,
    lower: int,
    kind: int,
    values: Floats,
    to_go: Floats,
    ceiling: float,
    ordered: bool,
) -> tuple[Integers, Floats, Floats, Integers]:
    """All states after one more runtime: first, left, cost and parent.

    States are grouped by the slack spent so far: those of s are first[s] : first[s + 1], by ascending `left`.
    left: requests handed on; cost: so far; parent: the previous state. demand to values: of the runtime, which
    gets `lower` workers and any part of the slack. to_go[s]: least remaining cost; states with
    cost + to_go > ceiling are dropped. ordered: for each s, keep only states that no other state beats in both
    left and cost; otherwise the cheapest for each left.
    """
    some_slack, some_parent, some_left, some_cost, done_cost, done_parent = _reach(
        first, left, cost, demand, capacity, lower, kind, values, to_go, ceiling
    )
    count, groups = len(some_slack), len(to_go)
    starts = np.zeros(groups + 1, np.int64)
    for some in range(count):
        starts[some_slack[some] + 1] += 1
    for spent in range(groups):
        starts[spent + 1] += starts[spent]
    places, ends = np.empty(count, np.int64), starts.copy()
    for some in range(count):
        places[ends[some_slack[some]]] = some
        ends[some_slack[some]] += 1
    new_first, new_parent = np.empty(groups + 1, np.int64), np.empty(count + groups, np.int64)
    new_left, new_cost = np.zeros(count + groups), np.empty(count + groups)
    size = 0
    for spent in range(groups):
        new_first[spent] = size
        least, newest = done_cost[spent], 0.0
        if least + to_go[spent] <= ceiling and done_parent[spent] >= 0:
            new_cost[size], new_parent[size] = least, done_parent[spent]
            size += 1
        _order(some_left, some_cost, places, starts[spent], starts[spent + 1])
        for place in range(starts[spent], starts[spent + 1]):
            some = places[place]
            if (some_cost[some] < least) if ordered else (some_left[some] > newest):
                least, newest = some_cost[some], some_left[some]
                new_left[size], new_cost[size], new_parent[size] = newest, least, some_parent[some]
                size += 1
    new_first[groups] = size
    return new_first, new_left[:size].copy(), new_cost[:size].copy(), new_parent[:size].copy()
