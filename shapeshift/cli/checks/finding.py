"""What `shapeshift doctor` finds out about one thing."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """state: OK; NOTE: what serving does without; MISSING: what serving needs. text: what there is, why not, remedy."""

    name: str
    state: str
    text: str
