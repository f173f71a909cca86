"""The configuration of a worker that Triton's own backends serve."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.polymorph import engine_model
from shapeshift.polymorph.settings import PolymorphSettings
from tests.polymorph.engine_models import made

OUTPUTS: dict[str, tuple[int, ...]] = {"EMBEDDING": (8,), "TOKEN_LOGITS": (-1, 3), "IMPORTANCE": (-1,)}


def config(**outputs: tuple[int, ...]) -> dict[str, Any]:
    engines = made("tensorrt", **outputs)
    shapes = {"string_value": engine_model.bin_shapes(engines)}
    return {"parameters": {engine_model.SHAPES: shapes}, **engine_model.tensors(engines)}


def dims(placed: dict[str, Any]) -> dict[str, list[int]]:
    return {tensor["name"]: tensor["dims"] for kind in ("input", "output") for tensor in placed[kind]}


@pytest.mark.parametrize(("edge", "tokens", "rows"), [(16, 16, 4), (32, 32, 8), (64, -1, -1)])
def test_a_bin_is_a_version_with_the_shape_of_its_engine(edge: int, tokens: int, rows: int) -> None:
    placed = config(**OUTPUTS)
    # Whatever it had before.
    for bin_edge in (16, 64, edge):
        engine_model.place(placed, bin_edge)
    assert placed["version_policy"] == {
        "specific": {"versions": [engine_model.version_of(made("tensorrt", **OUTPUTS), edge)]}
    }
    assert dims(placed) == {
        "INPUT_IDS": [1, tokens],
        "SEGMENTS": [1, tokens],
        "POSITIONS": [1, tokens],
        "ROWS": [rows],
        "EMBEDDING": [rows, 8],
        "TOKEN_LOGITS": [1, tokens, 3],
        "IMPORTANCE": [1, tokens],
    }


def test_a_version_is_one_bin_of_engines_that_give_the_same_answers() -> None:
    engines, longest = made(), replace(made(), max_tokens=8192)
    versions = {edge: engine_model.version_of(engines, edge) for edge in (16, 32, 64)}
    assert {edge: version % 10**6 for edge, version in versions.items()} == {16: 16, 32: 32, 64: 64}
    assert len({version // 10**6 for version in versions.values()}) == 1
    assert engine_model.version_of(replace(engines, hardware="another", build_key="another"), 16) == versions[16]
    assert engine_model.version_of(replace(engines, checkpoint_sha256="another"), 16) not in versions.values()
    assert 0 < engine_model.version_of(longest, 8192) < 2**63


@pytest.mark.parametrize("shape", [[16, 4], 16, [16, 4, 1, 0], None])
def test_a_worker_that_another_version_made_says_how_it_is_made_anew(shape: object) -> None:
    old = config()
    old["parameters"][engine_model.SHAPES] = {"string_value": json.dumps({"16": shape})}
    with pytest.raises(
        EngineError, match=r"bin_shapes of bin 16: got .*, not \[tokens, rows, version\].*`make engines`"
    ):
        engine_model.place(old, 16)


def test_a_bin_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="bin: got 48; one of 16, 32, 64"):
        engine_model.place(config(), 48)


@pytest.mark.parametrize("placement", ["inline", "resident", "auto"])
def test_other_placements_have_no_such_workers(placement: str) -> None:
    with pytest.raises(InvalidInputError, match="worker_backend: got 'triton'; polymorph, unless placement is partit"):
        PolymorphSettings(placement=placement, worker_backend="triton", slo_ms=9)
    with pytest.raises(InvalidInputError, match="worker_backend: got 'openvino'; one of polymorph, triton"):
        PolymorphSettings(worker_backend="openvino")
