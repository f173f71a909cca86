"""The configuration of a worker that Triton's own backends serve."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.polymorph import engine_model
from shapeshift.polymorph.settings import PolymorphSettings
from tests.polymorph.engine_models import made


def config(**outputs: tuple[int, ...]) -> dict[str, Any]:
    engines = made("tensorrt", **outputs)
    shapes = {"string_value": engine_model.bin_shapes(engines)}
    return {"parameters": {engine_model.SHAPES: shapes}, **engine_model.tensors(engines)}


def dims(placed: dict[str, Any]) -> dict[str, list[int]]:
    return {tensor["name"]: tensor["dims"] for kind in ("input", "output") for tensor in placed[kind]}


@pytest.mark.parametrize(("edge", "tokens", "rows"), [(16, 16, 4), (32, 32, 8), (64, -1, -1)])
def test_a_bin_is_a_version_with_the_shape_of_its_engine(edge: int, tokens: int, rows: int) -> None:
    placed = config(EMBEDDING=(8,), TOKEN_LOGITS=(-1, 3), IMPORTANCE=(-1,))
    # Whatever it had before.
    for bin_edge in (16, 64, edge):
        engine_model.place(placed, bin_edge)
    assert placed["version_policy"] == {"specific": {"versions": [edge]}}
    assert dims(placed) == {
        "INPUT_IDS": [1, tokens],
        "SEGMENTS": [1, tokens],
        "POSITIONS": [1, tokens],
        "ROWS": [rows],
        "EMBEDDING": [rows, 8],
        "TOKEN_LOGITS": [1, tokens, 3],
        "IMPORTANCE": [1, tokens],
    }


def test_a_bin_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="bin: got 48; one of 16, 32, 64"):
        engine_model.place(config(), 48)


@pytest.mark.parametrize("placement", ["inline", "resident", "auto"])
def test_other_placements_have_no_such_workers(placement: str) -> None:
    with pytest.raises(InvalidInputError, match="worker_backend: got 'triton'; polymorph, unless placement is partit"):
        PolymorphSettings(placement=placement, worker_backend="triton", slo_ms=9)
    with pytest.raises(InvalidInputError, match="worker_backend: got 'openvino'; one of polymorph, triton"):
        PolymorphSettings(worker_backend="openvino")
