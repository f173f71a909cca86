"""Error texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError


@pytest.mark.parametrize("value", ["/a/very" * 20 + "/last part.json", Path("/a/very" * 20 + "/last part.json")])
def test_a_long_path_keeps_its_end(value: object) -> None:
    shown = str(InvalidInputError("checkpoint", value, "must exist")).removeprefix("checkpoint: got ")
    assert shown.startswith("'…") and shown.endswith("/last part.json'; must exist")
    assert len(shown.removesuffix("; must exist")) == 80


def test_another_long_value_keeps_its_start() -> None:
    assert str(InvalidInputError("n", "x" * 100, "short")) == "n: got '" + "x" * 78 + "…; short"
    assert str(InvalidInputError("n", Path("/tmp/a"), "short")) == "n: got '/tmp/a'; short"
