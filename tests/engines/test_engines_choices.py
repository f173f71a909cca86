"""Precision, providers, settings of engines, verification and profiles."""

from __future__ import annotations

import builtins
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.engines import hardware
from shapeshift.engines.hardware import cores, cpu_model
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.profile import measure_interleaved
from shapeshift.engines.providers import lookup
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.engines.verify import MIN_COSINE, Deviation, ReferenceTexts, VerificationError, compare
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.kernels import kernel_build

BERT = {"model_type": "bert"}
CPUINFO = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: Some CPU
flags\t\t: fpu avx2 {}

processor\t: 1
model name\t: Some CPU
flags\t\t: fpu avx2 {}
"""


def cpuinfo(folder: Path, flag: str) -> Path:
    file = folder / "cpuinfo"
    file.write_text(CPUINFO.format(flag, flag))
    return file


@pytest.mark.parametrize(
    ("flag", "has"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f", False), ("noavx512_bf16", False)]
)
def test_bf16_is_a_flag_of_the_cpu(tmp_path: Path, flag: str, has: bool) -> None:
    assert hardware.cpu_has_bf16(cpuinfo(tmp_path, flag)) is has


def test_without_cpuinfo_there_is_no_bf16(tmp_path: Path) -> None:
    assert not hardware.cpu_has_bf16(tmp_path / "absent")
    (tmp_path / "empty").write_text("")
    assert not hardware.cpu_has_bf16(tmp_path / "empty")


def test_the_hardware_in_one_line(tmp_path: Path) -> None:
    assert cpu_model(cpuinfo(tmp_path, "avx512_bf16")) == "Some CPU, family 25 model 17 (avx2 avx512_bf16)"
    assert cpu_model(tmp_path / "absent")
    assert cores() >= 1


def test_providers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROVIDERS:
        assert PROVIDERS[name].name == name
    with pytest.raises(InvalidInputError, match="provider: got 'tflite'; one of openvino, native, onnxruntime, torch"):
        PROVIDERS["tflite"]
    assert (lookup.resolve("auto", []), lookup.resolve("auto", [1])) == ("openvino", "torch")
    assert lookup.resolve("onnxruntime", [1]) == "onnxruntime"
    assert (lookup.usable("torch", [1, 2]), lookup.usable("openvino", [1, 2])) == ([1, 2], ())


@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "torch", "tensorrt"])
def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = builtins.__import__

    def without(module: str, *others: Any) -> Any:
        if module == name:
            raise ImportError(module)
        return real(module, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=f"provider {name}: not installed"):
        PROVIDERS[name].version()


@pytest.mark.parametrize(
    ("bins", "edges"),
    [("histogram", None), ("staircase", None), ("none", []), ("512", [512]), ("16,32,64", [16, 32, 64])],
)
def test_bins(bins: str, edges: list[int] | None) -> None:
    assert TextEngineSettings("x", bins=bins).explicit_edges() == edges


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"checkpoint": ""}, "checkpoint"),
        ({"provider": "cuda"}, "provider"),
        ({"precision": "f8"}, "precision"),
        ({"pooling": "first"}, "pooling"),
        ({"pooling": "cls,first"}, "pooling"),
        ({"normalize": "yes"}, "normalize"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 9000}, "max_tokens"),
        ({"max_bins": 0}, "max_bins"),
        ({"bins": ""}, "bins"),
        ({"bins": "a,b"}, "bins"),
        ({"bins": "0,16"}, "bins"),
        ({"bins": "32,16"}, "bins"),
        ({"bins": "16,16"}, "bins"),
        ({"bins": "16,1024"}, "bins"),
        ({"bins": "none", "dynamic": False}, "bins"),
        ({"bins": "16,32", "dynamic": False}, "bins"),
    ],
)
def test_invalid_engine_settings(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        TextEngineSettings(**{"checkpoint": "x", **changes})
    assert caught.value.field == field


def test_deviation() -> None:
    reference = np.array([[1, 0], [0, 2]], np.float32)
    same = compare(reference, reference)
    assert (same.max_error, same.min_cosine) == (0, pytest.approx(1))
    off = compare(np.array([[1, 0], [2, 0]], np.float32), reference)
    assert (off.max_error, off.min_cosine) == (2, pytest.approx(0))
    assert compare(2 * reference, reference).min_cosine == pytest.approx(1)


@pytest.mark.parametrize("kind", MIN_COSINE)
def test_tolerance(kind: str) -> None:
    least = MIN_COSINE[kind]
    Deviation(0.1, least).require_within(kind, "it")
    refused = [Deviation(0.1, least - 1e-9), compare(np.zeros((1, 2)), np.ones((1, 2)))]
    for value in (np.nan, np.inf):
        vectors = np.array([[1.0, 0.0], [value, 0.0]])
        with np.errstate(invalid="ignore"):
            refused.append(compare(vectors, np.ones((2, 2))))
    for deviation in refused:
        with pytest.raises(
            VerificationError, match=f"^it differs from the reference: cosine .*, must be at least {least}"
        ):
            deviation.require_within(kind, "it")


def test_one_deviating_row_is_detected() -> None:
    asked: list[int] = []

    def embed(rows: Any) -> dict[str, np.ndarray]:
        return {"EMBEDDING": np.stack([[len(row), 1.0] for row in rows])}

    def reference(row: Any) -> dict[str, np.ndarray]:
        asked.append(len(row))
        return {"EMBEDDING": embed([row])["EMBEDDING"][0]}

    def off(rows: Any) -> dict[str, np.ndarray]:
        return {"EMBEDDING": embed(rows)["EMBEDDING"] * [[1, 1], [-1, 1]][: len(rows)]}

    texts = ReferenceTexts(reference, opening=101, closing=102, vocabulary=1000)
    ids, vectors = texts.row(9)
    assert (len(ids), ids[0], ids[-1], vectors["EMBEDDING"].tolist()) == (9, 101, 102, [9, 1])
    assert ids.min() >= 0 and ids.max() < 1000
    assert texts.deviation(embed, [[9], [4, 5]]).within("f32")
    assert not texts.deviation(off, [[9], [4, 5]]).within("bf16")
    assert asked == [9, 4, 5]


def test_texts_to_compare_do_not_contain_the_padding_id() -> None:
    texts = ReferenceTexts(lambda ids: {}, opening=3, closing=3, vocabulary=4, padding=1)
    assert set(texts.row(64)[0].tolist()) == {0, 2, 3}
    # Unless it counts for positions.
    counting = ReferenceTexts(lambda ids: {}, opening=3, closing=3, vocabulary=4, padding=1, middle=1)
    assert np.flatnonzero(counting.row(64)[0] == 1).tolist() == [32]


def test_logits_and_importance_are_compared_with_their_magnitude() -> None:
    def compute(row: Any) -> dict[str, np.ndarray]:
        weights = np.arange(1, len(row) + 1, dtype=np.float32)
        return {"LOGITS": np.array([len(row)], np.float32), "IMPORTANCE": weights}

    def run(rows: Any, factors: Any = (1, 1)) -> dict[str, np.ndarray]:
        longest = max(map(len, rows))
        found = [compute(row) for row in rows]
        padded = [np.pad(one["IMPORTANCE"], (0, longest - len(one["IMPORTANCE"])), constant_values=7) for one in found]
        return {"LOGITS": np.stack([one["LOGITS"] for one in found]) * factors[0],
                "IMPORTANCE": np.stack(padded) * factors[1]}  # fmt: skip

    texts = ReferenceTexts(compute, opening=101, closing=102, vocabulary=1000)
    assert texts.deviation(run, [[9], [4, 6]]).within("f32")
    for factors in ((1.1, 1), (1, 1.1), (-1, 1)):
        assert not texts.deviation(partial(run, factors=factors), [[9], [4, 6]]).within("bf16")


def test_profile_warms_up_and_runs_every_call_in_every_round() -> None:
    order: list[str] = []
    calls = [(8, lambda: order.append("a")), (16, lambda: order.append("b")), (32, lambda: order.append("c"))]
    points = measure_interleaved(calls, budget_s=1e9, seed=1, rounds=5)
    assert order[:3] == ["a", "b", "c"]
    rounds = [order[start : start + 3] for start in range(3, len(order), 3)]
    assert len(rounds) == 5 and sorted(rounds[0]) == ["a", "b", "c"]
    assert all(one == rounds[0] for one in rounds), "all others run between two runs of a call"
    assert [point.tokens for point in points] == [8, 16, 32]
    assert all(0 <= point.best_ms <= point.median_ms <= point.p99_ms for point in points)


def test_profile_runs_at_least_three_rounds() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    measure_interleaved([(8, call)], budget_s=0, rounds=7)
    assert count == 1 + 3


def test_tensorrt_competes_where_auto_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lookup.rival("auto", [0], BERT) is None, "it is not installed"
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.9"))
    found = lookup.rival("auto", [0], BERT)
    assert found is not None and found.name == "tensorrt"
    assert lookup.rival("torch", [0], BERT) is None


def test_native_competes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lookup.rival("auto", [], BERT)
    assert found is not None and found.name == "native"
    assert lookup.rival("openvino", [], BERT) is None
    assert lookup.rival("auto", [], {"model_type": "deberta"}) is None, "it has no kernels for it"
    monkeypatch.setattr(kernel_build, "COMPILER", "no-such-compiler")
    assert lookup.rival("auto", [], BERT) is None and not lookup.is_native_faster(BERT)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu_10"},
        {"model_type": "qwen3", "rope_scaling": {"type": "longrope"}},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        {"model_type": "deberta-v2", "conv_kernel_size": 3},
        {"model_type": "deberta-v2", "hidden_size": 16, "embedding_size": 8},
    ],
)
def test_native_is_not_taken_for_what_it_would_refuse(changes: dict[str, Any]) -> None:
    """`shapeshift add` writes it without a build of another provider."""
    assert lookup.rival("auto", [], {**BERT, **changes}) is None
    del changes[[*changes][-1]]
    assert lookup.rival("auto", [], {**BERT, **changes}) is not None


@pytest.mark.parametrize(("flags", "known"), [("avx2", True), ("avx2 avx512f", True), ("avx512f amx_tile", False)])
def test_native_is_taken_unmeasured_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, flags: str, known: bool
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: 0)
    monkeypatch.setattr(kernel_build, "cpu_flags", lambda: flags)
    assert lookup.is_native_faster(BERT) == known
    assert not lookup.is_native_faster({"model_type": "deberta"})


def test_a_build_keeps_rows_and_what_the_reference_makes_of_them() -> None:
    """The sidecar asks the served model for the same."""
    texts = ReferenceTexts(
        lambda ids: {"EMBEDDING": np.array([len(ids), 1 / 3], np.float32), "TOKEN_LOGITS": np.zeros((len(ids), 2))},
        opening=3,
        closing=4,
        vocabulary=9,
    )
    values = json.loads(texts.kept("bf16"))
    assert [(ids[0], ids[-1], len(ids)) for ids in values["ids"]] == [(3, 4, 7), (3, 4, 16)]
    assert values["outputs"] == {"EMBEDDING": [[7.0, 0.333333], [16.0, 0.333333]]}
    assert values["min_cosine"] == MIN_COSINE["bf16"]
