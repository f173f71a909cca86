"""The precision of a model that generates, and the bytes and groups that follow from it."""

from __future__ import annotations

import pytest

from shapeshift.engines import hardware
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode import settings
from shapeshift.fused_decode.settings import GROUP_SIZES, QUANTISED


def test_quantised_checkpoints_stay_as_they_are_on_a_cpu() -> None:
    assert settings.resolve("auto", None, 4) == "int4"
    assert settings.resolve("auto") == hardware.resolve_precision("auto")
    assert settings.resolve("f32", None, 4) == "f32"


@pytest.mark.parametrize("requested", QUANTISED)
def test_quantised_weights_are_for_cpus(requested: str) -> None:
    assert settings.resolve(requested) == requested
    for device in (0, 1):
        with pytest.raises(UnsupportedError, match=f"{requested} is for CPUs; set bf16"):
            settings.resolve(requested, device)


def test_what_is_no_weight_of_a_linear_is_computed_in_16_bits_where_the_cpu_has_them() -> None:
    assert {settings.computed(one) for one in QUANTISED} == {"bf16" if hardware.cpu_has_bf16() else "f32"}
    assert [settings.computed(one) for one in ("f32", "f16", "bf16")] == ["f32", "f16", "bf16"]


def test_a_vector_in_int8_has_a_scale_behind_its_numbers() -> None:
    assert [settings.vector_bytes(64, 2, kind) for kind in ("auto", "int8")] == [128, 68]
    assert [settings.vector_bytes(64, 4, kind) for kind in ("auto", "int8")] == [256, 68]


def test_a_cache_in_int8_is_for_cpus() -> None:
    for requested, on_gpu in (("auto", True), ("auto", False), ("int8", False)):
        settings.require_kv_precision(requested, on_gpu)
    with pytest.raises(UnsupportedError, match="kv_precision: int8 is for CPUs; set auto for a GPU"):
        settings.require_kv_precision("int8", True)


def test_a_group_is_stated_or_the_first_that_divides_the_inputs() -> None:
    assert settings.group_of(8, 256, 32) == 0
    assert settings.group_of(4, 256, 32) == 32
    for inputs in (*GROUP_SIZES, 2 * GROUP_SIZES[0]):
        wanted = next(size for size in GROUP_SIZES if inputs % size == 0)
        assert settings.group_of(4, inputs) == wanted
    assert settings.group_of(4, 7) == GROUP_SIZES[-1]
