"""The actions that lead from the workers' current bins to planned counts, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shapeshift.polymorph.policy import replace
from shapeshift.sidecar.front_config import ALL_BINS, Front
from shapeshift.sidecar.policy.plan import fitting_bin
from shapeshift.triton.names import split

# Workers loaded at once for each node while none of the front's workers serves.
_START_BATCH = 4


def under_load(workers: int) -> int:
    """How many of a front's `workers` are changed at once while the others serve: an eighth, at least one."""
    return max(workers // 8, 1)


def at_start(nodes: int) -> int:
    """How many workers of a front on so many nodes are loaded at once while none of them serves."""
    return _START_BATCH * max(nodes, 1)


@dataclass(frozen=True)
class Action:
    """One change of one worker: load it with `bin`, change its bin from `before` to `bin`, or unload it."""

    kind: Literal["load", "change", "unload"]
    worker: str
    bin: int = ALL_BINS
    before: int = ALL_BINS

    def __str__(self) -> str:
        if self.kind == "unload":
            return f"unload {self.worker}"
        held = "all bins" if self.bin == ALL_BINS else str(self.bin)
        return f"load {self.worker} with {held}" if self.kind == "load" else f"{self.worker} {self.before} -> {held}"


def moves(
    front: Front,
    current: Mapping[str, int],
    counts: Sequence[int],
    spare: Sequence[str],
    outstanding: Mapping[str, int],
) -> list[Action]:
    """The fewest actions that lead from the bins `current` (worker: bin) to `counts`.

    counts: workers by bin, or one number if workers hold all bins. spare: worker models that can be loaded; if workers
    are missing, the first of them are loaded, the longest bins first. outstanding: requests by worker; if there are
    too many workers, those with the fewest are unloaded, among the bins with too many workers. The actions are in
    the order load, change, unload. Raises ValueError if `spare` is too short.
    """
    if not front.is_binned:
        return _unbinned(current, sum(counts), spare, outstanding)
    held = {worker: fitting_bin(front, bin_) for worker, bin_ in current.items()}
    lacking = {edge: count - list(held.values()).count(edge) for edge, count in zip(front.edges, counts, strict=True)}
    missing = sum(lacking.values())
    _require_spare(spare, missing)
    loads: list[Action] = []
    for worker in spare[: max(missing, 0)]:
        edge = max(edge for edge in front.edges if lacking[edge] > 0)
        lacking[edge] -= 1
        loads.append(Action("load", worker, edge))
    unloads = []
    for _ in range(-missing):
        surplus = [worker for worker in held if lacking[held[worker]] < 0]
        worker = min(release_order(held, surplus), key=lambda worker: outstanding.get(worker, 0))
        lacking[held[worker]] += 1
        unloads.append(Action("unload", worker, before=held.pop(worker)))
    return [*loads, *_changes(front, current, held, lacking), *unloads]


def release_order(loaded: Collection[str], workers: Collection[str] | None = None) -> list[str]:
    """Those of the `loaded` workers that are in `workers` (default: all), those of the fullest nodes first."""
    held = Counter(split(worker)[0] for worker in loaded)
    return sorted(loaded if workers is None else workers, key=lambda worker: (-held[split(worker)[0]], worker))


def batches(actions: Sequence[Action], size: int) -> Iterator[list[Action]]:
    """The actions in the order in which to apply them, at most `size` at once: loads, changes, unloads."""
    loads = sorted((action for action in actions if action.kind == "load"), key=lambda action: -action.bin)
    for start in range(0, len(loads), size):
        yield loads[start : start + size]
    changes = [action for action in actions if action.kind == "change"]
    pairs = [(index, action.bin) for index, action in enumerate(changes)]
    for part in replace.batches(pairs, [action.before for action in changes], size):
        yield [changes[index] for index, _ in part]
    yield from ([action] for action in actions if action.kind == "unload")


def _changes(
    front: Front, current: Mapping[str, int], held: Mapping[str, int], lacking: Mapping[int, int]
) -> Iterator[Action]:
    workers = sorted(held)
    bins = [held[worker] for worker in workers]
    counts = [bins.count(edge) + lacking[edge] for edge in front.edges]
    planned = dict(replace.changes(bins, counts, list(front.edges)))
    for index, worker in enumerate(workers):
        target = planned.get(index, bins[index])
        # A bin that `make engines` has removed changes to the next longer one, even if that count is right.
        if target != current[worker]:
            yield Action("change", worker, target, current[worker])


def _unbinned(
    current: Mapping[str, int], count: int, spare: Sequence[str], outstanding: Mapping[str, int]
) -> list[Action]:
    missing = count - len(current)
    _require_spare(spare, missing)
    least_busy = sorted(release_order(current), key=lambda worker: outstanding.get(worker, 0))
    released = least_busy[: max(-missing, 0)]
    return [
        *(Action("load", worker, ALL_BINS) for worker in spare[: max(missing, 0)]),
        *(
            Action("change", worker, ALL_BINS, bin_)
            for worker, bin_ in sorted(current.items())
            if bin_ != ALL_BINS and worker not in released
        ),
        *(Action("unload", worker, before=current[worker]) for worker in released),
    ]


def _require_spare(spare: Sequence[str], missing: int) -> None:
    if missing > len(spare):
        raise ValueError(f"spare: got {len(spare)} workers; must be at least {missing}")
