"""The policies of this technique and their JSON face."""

from __future__ import annotations

from typing import Any

import numpy as np

from shapeshift.cascade import calibrate, ensemble, prune, route, select
from shapeshift.cascade.softmax import softmax
from shapeshift.errors import InvalidInputError
from shapeshift.policy import Optional, Policy, boolean, integer, list_of, nullable, number, record

_LOGITS = list_of(number(), least=1)


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "a name")
    return value


def _as_many(name: str, values: list[Any], as_name: str, as_many: int) -> None:
    if len(values) != as_many:
        raise InvalidInputError(name, f"{len(values)} values", f"as many as {as_name} has ({as_many})")


def _calibrate(logits: list[list[float]], labels: list[int]) -> dict[str, Any]:
    _as_many("labels", labels, "logits", len(logits))
    classes = len(logits[0])
    for index, (row, label) in enumerate(zip(logits, labels, strict=True)):
        _as_many(f"logits[{index}]", row, "logits[0]", classes)
        if label >= classes:
            raise InvalidInputError(f"labels[{index}]", label, f"0 to {classes - 1}")
    return {"temperature": calibrate.temperature(np.array(logits), np.array(labels))}


def _route(
    logits: list[float] | None, temperature: float, confidence: float | None, c: float, k: float, algorithm: str
) -> dict[str, Any]:
    if (logits is None) == (confidence is None):
        given = {"logits": logits, "confidence": confidence}
        raise InvalidInputError("logits, confidence", given, "one of the two")
    con = confidence if logits is None else route.confidence(np.array(logits), temperature)
    assert con is not None
    return {"confidence": con, "p_large": route.p_large(con, route.Rule(c, k, algorithm))}


def _prune(importance: list[float], special: list[bool], word_ids: list[int | None], alpha: float) -> dict[str, Any]:
    _as_many("special", special, "importance", len(importance))
    _as_many("word_ids", word_ids, "importance", len(importance))
    count = max((word for word in word_ids if word is not None), default=-1) + 1
    masks = prune.prune(np.array(importance, dtype=float), prune.words_of(special, word_ids), count, alpha)
    return {"token_mask": masks.tokens.tolist(), "word_mask": masks.words.tolist()}


def _ensemble(small: list[float], large: list[float], w: float) -> dict[str, Any]:
    _as_many("large", large, "small", len(small))
    return {"s": ensemble.combine(softmax(np.array(small)), softmax(np.array(large)), w).tolist()}


def _select(candidates: list[select.Measured], min_accuracy: float, max_latency: float) -> dict[str, Any]:
    names = [one.name for one in candidates]
    if len(set(names)) < len(names):
        raise InvalidInputError("candidates", names, "names that stand only once")
    found = select.select(candidates, min_accuracy, max_latency)
    return {"selected": found.name if found else None}


_CANDIDATE = record(
    {
        "name": _word,
        "accuracy": number(),
        "latency": number(minimum=0),
        "p75": number(minimum=0),
        "model_latencies": list_of(number(minimum=0), least=1),
    },
    lambda name, accuracy, latency, p75, model_latencies: select.Measured(
        name, accuracy, latency, p75, tuple(model_latencies)
    ),
)

POLICIES = (
    Policy(
        "cascade.calibrate",
        "the temperature that makes a model's confidence agree with its accuracy",
        _calibrate,
        {"logits": list_of(list_of(number(), least=2), least=1), "labels": list_of(integer(minimum=0))},
    ),
    Policy(
        "cascade.route",
        "how likely a query goes on to the larger model",
        _route,
        {
            "logits": Optional(nullable(_LOGITS), None),
            "temperature": Optional(number(above=0), 1.0),
            "confidence": Optional(nullable(number(minimum=0, maximum=1)), None),
            "c": number(minimum=0, maximum=1),
            "k": number(minimum=0),
        },
        tuple(route.ALGORITHMS),
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
        "the answers of two models as one",
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
