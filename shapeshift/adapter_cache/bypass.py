"""Whether a request may pass a head that waits for memory (Chameleon, section 4.2, "Bypassing adapter blocking")."""

from __future__ import annotations


def allowed(
    head_wait_s: float, head_need: float, candidate_need: float, candidate_predicted_s: float, free: float
) -> bool:
    """True where the head does not fit into `free`, the candidate does, and ends before the head could begin.

    head_wait_s: until there is room for the head; candidate_predicted_s: until the candidate has ended, were it
    admitted now. Needs and `free` in one unit.
    """
    return candidate_need <= free < head_need and candidate_predicted_s <= head_wait_s
