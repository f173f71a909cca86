"""The weighted request size, WRS (Chameleon, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

INPUT, OUTPUT, RANK = 0.3, 0.5, 0.2
"""The paper's weights A, B and C."""


@dataclass(frozen=True)
class Largest:
    """The maxima that sizes are relative to: tokens of a prompt, tokens of an answer, rank of an adapter."""

    input: float
    output: float
    rank: float


def weighted(input_tokens: float, output_tokens: float, rank: float, largest: Largest) -> float:
    """WRS = A input / max + B output / max + C rank / max, each ratio at most 1; 0 to 1."""
    return (
        INPUT * _ratio(input_tokens, largest.input)
        + OUTPUT * _ratio(output_tokens, largest.output)
        + RANK * _ratio(rank, largest.rank)
    )


def _ratio(value: float, largest: float) -> float:
    """At most 1; 0 if the maximum is 0."""
    return min(value / largest, 1.0) if largest > 0 else 0.0
