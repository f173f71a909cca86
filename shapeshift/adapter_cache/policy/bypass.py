"""Whether a request may overtake a head that waits for memory (Chameleon, 4.2, "Bypassing adapter blocking")."""

from __future__ import annotations

from collections.abc import Iterable


def allowed(
    head_wait_s: float, head_need: float, candidate_need: float, candidate_predicted_s: float, free: float
) -> bool:
    """True if the head does not fit into `free`, the candidate does, and the candidate ends before the head can start.

    head_wait_s: seconds until enough memory is free for the head; candidate_predicted_s: predicted run time of the
    candidate. The needs and `free` have the same unit.
    """
    return candidate_need <= free < head_need and candidate_predicted_s <= head_wait_s


def head_wait_s(shortage: float, running: Iterable[tuple[float, float]], iteration_s: float) -> float:
    """Seconds until the running requests have freed `shortage`, if all end as predicted.

    running: remaining iterations of each request, and what it frees at its end. If all of them free too little, the
    result is the time until the last one ends.
    """
    left = 0.0
    for left, freed in sorted(running):  # noqa: B007  the last value of `left` is the result
        shortage -= freed
        if shortage <= 0:
            break
    return left * iteration_s
