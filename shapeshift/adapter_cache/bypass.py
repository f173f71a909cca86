"""Whether a request may pass a head that waits for memory (Chameleon, section 4.2, "Bypassing adapter blocking")."""

from __future__ import annotations

from collections.abc import Iterable


def allowed(
    head_wait_s: float, head_need: float, candidate_need: float, candidate_predicted_s: float, free: float
) -> bool:
    """True where the head does not fit into `free`, the candidate does, and ends before the head could begin.

    head_wait_s: until there is room for the head; candidate_predicted_s: until the candidate has ended, were it
    admitted now. Needs and `free` in one unit.
    """
    return candidate_need <= free < head_need and candidate_predicted_s <= head_wait_s


def head_wait_s(short: float, running: Iterable[tuple[float, float]], iteration_s: float) -> float:
    """Until those who run will have freed `short`, should they end as foretold.

    running: iterations that each still needs, and what it frees at its end. Where all of it is too little: until the
    last has ended.
    """
    left = 0.0
    for left, freed in sorted(running):  # noqa: B007  what the last one needed is the answer
        short -= freed
        if short <= 0:
            break
    return left * iteration_s
