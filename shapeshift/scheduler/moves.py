"""From the bins that workers hold to the counts that a plan wants: what to load, to change and to unload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shapeshift.polymorph import replace
from shapeshift.scheduler.front import ALL, Front
from shapeshift.scheduler.plan import fitting


@dataclass(frozen=True)
class Action:
    """One worker's change: load it with a bin, change its bin from `before`, or unload it."""

    kind: Literal["load", "change", "unload"]
    worker: str
    bin: int = ALL
    before: int = ALL

    def __str__(self) -> str:
        if self.kind == "unload":
            return f"unload {self.worker}"
        held = "all bins" if self.bin == ALL else str(self.bin)
        return f"load {self.worker} with {held}" if self.kind == "load" else f"{self.worker} {self.before} -> {held}"


def moves(
    front: Front,
    have: Mapping[str, int],
    counts: Sequence[int],
    spare: Sequence[str],
    outstanding: Mapping[str, int],
) -> list[Action]:
    """The fewest changes from the workers' bins `have` to `counts`, by bin (one count where workers hold all).

    With more workers wanted than there are, the first of `spare` are loaded, with the longest bins that lack
    workers; with fewer, those of surplus bins that have least outstanding are unloaded. In the order load,
    change, unload. Raises ValueError where `spare` is too short.
    """
    if not front.is_binned:
        return _unbinned(have, sum(counts), spare, outstanding)
    held = {worker: fitting(front, bin_) for worker, bin_ in have.items()}
    lacking = {edge: count - list(held.values()).count(edge) for edge, count in zip(front.edges, counts, strict=True)}
    missing = sum(lacking.values())
    if missing > len(spare):
        raise ValueError(f"spare: got {len(spare)} workers; at least {missing}")
    actions: list[Action] = []
    for worker in spare[: max(missing, 0)]:
        edge = max(edge for edge in front.edges if lacking[edge] > 0)
        lacking[edge] -= 1
        actions.append(Action("load", worker, edge))
    released = []
    for _ in range(-missing):
        surplus = [worker for worker in held if lacking[held[worker]] < 0]
        worker = min(surplus, key=lambda worker: (outstanding.get(worker, 0), worker))
        lacking[held[worker]] += 1
        released.append(Action("unload", worker, before=held.pop(worker)))
    return [*actions, *_changes(front, have, held, lacking), *released]


def batches(actions: Sequence[Action], size: int, release_first: bool = False) -> Iterator[list[Action]]:
    """The actions in the order to carry them out, at most `size` at once: what grows first, what shrinks last.

    With `release_first`, unloads come before all else: for workers that share something with those to be loaded.
    """
    unloads = [[action] for action in actions if action.kind == "unload"]
    loads = sorted((action for action in actions if action.kind == "load"), key=lambda action: -action.bin)
    if release_first:
        yield from unloads
    for start in range(0, len(loads), size):
        yield loads[start : start + size]
    changes = [action for action in actions if action.kind == "change"]
    pairs = [(index, action.bin) for index, action in enumerate(changes)]
    for part in replace.batches(pairs, [action.before for action in changes], size):
        yield [changes[index] for index, _ in part]
    if not release_first:
        yield from unloads


def _changes(
    front: Front, have: Mapping[str, int], held: Mapping[str, int], lacking: Mapping[int, int]
) -> Iterator[Action]:
    workers = sorted(held)
    bins = [held[worker] for worker in workers]
    want = [bins.count(edge) + lacking[edge] for edge in front.edges]
    planned = dict(replace.changes(bins, want, list(front.edges)))
    for index, worker in enumerate(workers):
        wanted = planned.get(index, bins[index])
        # A bin that is no longer one changes even where its place is right.
        if wanted != have[worker]:
            yield Action("change", worker, wanted, have[worker])


def _unbinned(
    have: Mapping[str, int], wanted: int, spare: Sequence[str], outstanding: Mapping[str, int]
) -> list[Action]:
    missing = wanted - len(have)
    if missing > len(spare):
        raise ValueError(f"spare: got {len(spare)} workers; at least {missing}")
    idle = sorted(have, key=lambda worker: (outstanding.get(worker, 0), worker))
    changed = [Action("change", worker, ALL, bin_) for worker, bin_ in sorted(have.items()) if bin_ != ALL]
    released = idle[: max(-missing, 0)]
    return [
        *(Action("load", worker, ALL) for worker in spare[: max(missing, 0)]),
        *(action for action in changed if action.worker not in released),
        *(Action("unload", worker, before=have[worker]) for worker in released),
    ]
