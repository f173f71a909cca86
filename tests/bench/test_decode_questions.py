"""The questions that `chat` is scored with, and the table of their answers."""

from __future__ import annotations

import math

import pytest

from bench.fused_decode.questions import OURS, QUESTIONS, SAME_FILE, Answer, is_right, report


def test_there_are_forty_and_no_question_holds_its_answer() -> None:
    assert len(QUESTIONS) == 40
    assert [question for question in QUESTIONS if is_right(question, question)] == []


@pytest.mark.parametrize(
    ("text", "right"),
    [("It is PARIS.", True), ("Lyon", False), ("Parisian", False), ("", False)],
)
def test_an_accepted_word_makes_an_answer_right(text: str, right: bool) -> None:
    assert is_right("What is the capital of France?", text) is right


def test_the_table_has_medians_and_ours_over_the_other() -> None:
    ours = [Answer("Paris", 10.0, 100.0), Answer("Paris", 30.0, 100.0)]
    theirs = [Answer("Lyon", 20.0, 50.0), Answer("Lyon", 20.0, math.nan)]
    first, second = report({"What is the capital of France?": {OURS: ours, SAME_FILE: theirs}})
    assert first == {"system": OURS, "right": 1, "first token, ms": 20.0, "tokens/s": 100.0}
    assert second == {
        "system": SAME_FILE,
        "right": 0,
        "first token, ms": 20.0,
        "ours over it, first token": 1.0,
        "tokens/s": 50.0,
        "ours over it, tokens/s": 2.0,
    }
