"""The JSON face of the technique's policies: answers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.adapter_cache.policy.api import POLICIES
from shapeshift.errors import InvalidInputError

BY_NAME = {policy.name.removeprefix("adapter_cache."): policy for policy in POLICIES}
ENTRY = {"id": "a", "size": 10, "freq": 2, "last": 5, "rc": 0, "queued": False}
EVICT = {"entries": [ENTRY, ENTRY | {"id": "b", "freq": 1}], "now": 9, "need": 5}
SIZE = {"input": 50, "output": 20, "rank": 8, "max_input": 100, "max_output": 100, "max_rank": 16}
QUEUES = {"queues": [{"S": 10, "D": 1, "lam": 2}, {"S": 100, "D": 1, "lam": 1}], "total": 480, "slo": 1}
EVENTS = [["submit", 0, "a", 6], ["submit", 0, "b", 6], ["step"], ["finish", "a"], ["step"]]
ADMIT = {"quota": [10, 5], "events": EVENTS}
BYPASS = {"head_wait_s": 2, "head_need": 9, "candidate_need": 3, "candidate_predicted_s": 1, "free": 4}
GIVEN: dict[str, dict[str, Any]] = {
    "evict": EVICT,
    "size": SIZE,
    "cluster": {"x": [1, 2, 3, 11, 12, 13]},
    "quota": QUEUES,
    "admit": ADMIT,
    "bypass": BYPASS,
}


def evaluate(name: str, given: Any = None) -> dict[str, Any]:
    return BY_NAME[name].evaluate(GIVEN[name] if given is None else given)


def test_answers() -> None:
    assert set(BY_NAME) == set(GIVEN)
    assert evaluate("evict") == {"evict": ["b"], "clock": 0.1, "algorithm": "gdsf"}
    assert evaluate("evict", EVICT | {"need": 25, "clock": 3}) == {"evict": None, "clock": 3, "algorithm": "gdsf"}
    assert evaluate("evict", EVICT | {"need": 0})["evict"] == []
    assert evaluate("evict", EVICT | {"algorithm": "lru"}) == {"evict": ["a"], "clock": 0, "algorithm": "lru"}
    assert evaluate("size") == {"wrs": pytest.approx(0.3 * 0.5 + 0.5 * 0.2 + 0.2 * 0.5)}
    assert evaluate("cluster") == {"k": 2, "wcss": pytest.approx(4), "centroids": [2, 12], "cutoffs": [7]}
    assert evaluate("cluster", {"x": [1, 2, 3], "k": 9})["k"] == 3
    assert evaluate("quota")["tok_min"] == [30, 200]
    assert evaluate("admit") == {"steps": [[["a"], ["b"]], [[], []]], "used": [6, 0]}
    assert evaluate("bypass") == {"bypass": True}


@pytest.mark.parametrize("algorithm", ["gdsf", "score", "lru", "lfu", "fair"])
def test_whoever_is_used_or_pinned_stays_and_who_is_queued_goes_last(algorithm: str) -> None:
    names = ("queued", "used", "pinned", "idle")
    marks: list[dict[str, object]] = [
        {"queued": True, "freq": 0, "last": 0},
        {"rc": 1},
        {"pinned": True},
        {"freq": 9, "last": 8},
    ]
    entries = [{**ENTRY, "id": name, **mark} for name, mark in zip(names, marks, strict=True)]
    given = {"entries": entries, "now": 9, "need": 15, "algorithm": algorithm}
    assert evaluate("evict", given)["evict"] == ["idle", "queued"]
    assert evaluate("evict", given | {"need": 21})["evict"] is None


@pytest.mark.parametrize(
    ("name", "changed", "field"),
    [
        ("evict", {"entries": [ENTRY, ENTRY]}, "entries"),
        ("evict", {"entries": [ENTRY, ENTRY | {"id": 1}]}, "entries"),
        ("evict", {"entries": [ENTRY | {"size": -1}]}, "entries[0].size"),
        ("evict", {"entries": [ENTRY | {"rc": 0.5}]}, "entries[0].rc"),
        ("evict", {"entries": [ENTRY | {"queued": "no"}]}, "entries[0].queued"),
        ("evict", {"entries": [ENTRY | {"age": 1}]}, "entries[0].age"),
        ("evict", {"algorithm": "belady"}, "algorithm"),
        ("evict", {"now": None}, "now"),
        ("size", {"max_rank": 0}, "max_rank"),
        ("size", {"rank": -1}, "rank"),
        ("cluster", {"x": []}, "x"),
        ("cluster", {"x": [1.0] * 10_001}, "x"),
        ("cluster", {"k": 0}, "k"),
        ("cluster", {"max_k": None}, "max_k"),
        ("quota", {"queues": []}, "queues"),
        ("quota", {"queues": [{"S": 0, "D": 1, "lam": 1}]}, "queues[0].S"),
        ("quota", {"queues": [{"S": 1, "D": 1}]}, "queues[0].lam"),
        ("quota", {"slo": 0}, "slo"),
        ("quota", {"total": -1}, "total"),
        ("admit", {"quota": []}, "quota"),
        ("admit", {"events": [["submit", 2, "a", 1]]}, "events[0][1]"),
        ("admit", {"events": [["submit", 0, "a", 1], ["submit", 1, "a", 1]]}, "events[1][2]"),
        ("admit", {"events": [["submit", 0, "a", 0]]}, "events[0][3]"),
        ("admit", {"events": [["submit", 0, "a"]]}, "events[0]"),
        ("admit", {"events": [["finish", 1.5]]}, "events[0][1]"),
        ("admit", {"events": [["stop"]]}, "events[0]"),
        ("admit", {"events": ["step"]}, "events[0]"),
        ("admit", {"events": [[]]}, "events[0]"),
        ("bypass", {"free": -1}, "free"),
        ("bypass", {"head_wait_s": True}, "head_wait_s"),
    ],
)
def test_what_cannot_be_meant_is_named(name: str, changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        evaluate(name, GIVEN[name] | changed)
    assert refused.value.field == field


@pytest.mark.parametrize("name", GIVEN)
def test_every_key_but_the_optional_ones_is_required(name: str) -> None:
    for key in GIVEN[name]:
        rest = {other: value for other, value in GIVEN[name].items() if other != key}
        with pytest.raises(InvalidInputError, match=f"{key}: got None; this key is required"):
            evaluate(name, rest)
    with pytest.raises(InvalidInputError, match="unknown key"):
        evaluate(name, GIVEN[name] | {"more": 1})
