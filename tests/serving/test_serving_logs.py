"""Levels of what fronts log."""

from __future__ import annotations

import pytest

from shapeshift.serving.model_args import model_log
from tests.fakes import PbUtils


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_line_has_its_level_and_the_models_name(level: str) -> None:
    pb_utils = PbUtils()
    getattr(model_log(pb_utils, "encode"), level)("100% of it")
    assert pb_utils.Logger.lines == ["encode: 100% of it"]
    assert pb_utils.Logger.levels == [level.removesuffix("ing")]


def test_two_servers_of_one_name_have_their_own_logs() -> None:
    first, second = PbUtils(), PbUtils()
    model_log(first, "encode").info("a")
    model_log(second, "encode").info("b")
    assert (first.Logger.lines, second.Logger.lines) == (["encode: a"], ["encode: b"])
