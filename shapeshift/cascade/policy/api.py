"""The policies of this technique as JSON, for `shapeshift policy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeshift.cascade.policy import calibration, pruning, routing, selection
from shapeshift.cascade.policy.routing import softmax
from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import OptionalField, Policy, boolean, integer, list_of, nullable, number, record

_LOGITS = list_of(number(), min_length=1)


@dataclass(frozen=True)
class _Candidate:
    """A `selection.Measured`."""

    name: str
    accuracy: float
    latency_ms: float
    p75_ms: float
    model_latencies: tuple[float, ...]

    @property
    def assured_accuracy(self) -> float:
        """The accuracy that the caller states."""
        return self.accuracy


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "a name")
    return value


def _require_length(name: str, values: list[Any], other: str, length: int) -> None:
    if len(values) != length:
        raise InvalidInputError(name, f"{len(values)} values", f"as many as {other} has ({length})")


def _calibrate(logits: list[list[float]], labels: list[int]) -> dict[str, Any]:
    _require_length("labels", labels, "logits", len(logits))
    classes = len(logits[0])
    for index, (row, label) in enumerate(zip(logits, labels, strict=True)):
        _require_length(f"logits[{index}]", row, "logits[0]", classes)
        if label >= classes:
            raise InvalidInputError(f"labels[{index}]", label, f"0 to {classes - 1}")
    return {"temperature": calibration.fit_temperature(np.array(logits), np.array(labels))}


def _route(
    logits: list[float] | None, temperature: float, confidence: float | None, c: float, k: float, algorithm: str
) -> dict[str, Any]:
    if (logits is None) == (confidence is None):
        values = {"logits": logits, "confidence": confidence}
        raise InvalidInputError("logits, confidence", values, "one of the two")
    if logits is not None:
        confidence = float(routing.confidence(np.array(logits), temperature))
    assert confidence is not None
    return {"confidence": confidence, "p_large": routing.p_large(confidence, routing.RoutingRule(c, k, algorithm))}


def _prune(importance: list[float], special: list[bool], word_ids: list[int | None], alpha: float) -> dict[str, Any]:
    _require_length("special", special, "importance", len(importance))
    _require_length("word_ids", word_ids, "importance", len(importance))
    count = max((word for word in word_ids if word is not None), default=-1) + 1
    masks = pruning.masks(np.array(importance, dtype=float), pruning.words_of_ids(special, word_ids), count, alpha)
    return {"token_mask": masks.tokens.tolist(), "word_mask": masks.words.tolist()}


def _ensemble(small: list[float], large: list[float], w: float) -> dict[str, Any]:
    _require_length("large", large, "small", len(small))
    return {"s": routing.combine(softmax(np.array(small)), softmax(np.array(large)), w).tolist()}


def _select(candidates: list[_Candidate], min_accuracy: float, max_latency: float) -> dict[str, Any]:
    names = [one.name for one in candidates]
    if len(set(names)) < len(names):
        raise InvalidInputError("candidates", names, "each name once")
    selected = selection.select(candidates, min_accuracy, max_latency)
    return {"selected": selected.name if selected else None}


_CANDIDATE = record(
    {
        "name": _name,
        "accuracy": number(),
        "latency": number(minimum=0),
        "p75": number(minimum=0),
        "model_latencies": list_of(number(minimum=0), min_length=1),
    },
    lambda name, accuracy, latency, p75, model_latencies: _Candidate(
        name, accuracy, latency, p75, tuple(model_latencies)
    ),
)

POLICIES = (
    Policy(
        "cascade.calibrate",
        "the temperature that makes a model's confidence agree with its accuracy",
        _calibrate,
        {"logits": list_of(list_of(number(), min_length=2), min_length=1), "labels": list_of(integer(minimum=0))},
    ),
    Policy(
        "cascade.route",
        "the probability that a text goes on to the larger model",
        _route,
        {
            "logits": OptionalField(nullable(_LOGITS), None),
            "temperature": OptionalField(number(above=0), 1.0),
            "confidence": OptionalField(nullable(number(minimum=0, maximum=1)), None),
            "c": number(minimum=0, maximum=1),
            "k": number(minimum=0),
        },
        tuple(routing.ALGORITHMS),
    ),
    Policy(
        "cascade.prune",
        "which words the larger model need not read",
        _prune,
        {
            "importance": list_of(number(minimum=0)),
            "special": list_of(boolean),
            "word_ids": list_of(nullable(integer(minimum=0))),
            "alpha": number(minimum=0),
        },
    ),
    Policy(
        "cascade.ensemble",
        "the weighted ensemble of two models",
        _ensemble,
        {"small": _LOGITS, "large": _LOGITS, "w": number(minimum=0, maximum=1)},
    ),
    Policy(
        "cascade.select",
        "the fastest candidate that meets an accuracy and a latency target",
        _select,
        {
            "candidates": list_of(_CANDIDATE),
            "min_accuracy": number(),
            "max_latency": number(minimum=0),
        },
    ),
)
