"""The physical bound of decode figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.fused_decode.bound import Machine, Model, least_seconds
from shapeshift.engines import hardware

MODEL = Model(linears=1000, head=200, cached=10)


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    size = Model.read(tmp_path)
    assert size.linears + size.head == model.num_parameters() - norms
    assert size.cached == 3 * 2 * 2 * 4


def test_one_request_reads_the_weights_once_a_token() -> None:
    machine = Machine(flops=1e30, read=1.0)
    cached = 10 * 4 * (8 + 1 + 8 + 2)
    assert least_seconds(machine, MODEL, "f32", 8, [3]) == pytest.approx(3 * 1200 * 4 + cached)
    assert least_seconds(machine, MODEL, "bf16", 8, [3]) == pytest.approx((3 * 1200 * 4 + cached) / 2)


def test_quantised_weights_are_read_in_their_bits() -> None:
    """Beside them the cache as it is computed; the head has 8 bits in both."""
    machine = Machine(flops=1e30, read=1.0)
    cached = 10 * (2 if hardware.cpu_has_bf16() else 4) * (8 + 1 + 8 + 2)
    assert least_seconds(machine, MODEL, "int8", 8, [3]) == pytest.approx(3 * 1200 + cached)
    assert least_seconds(machine, MODEL, "int4", 8, [3]) == pytest.approx(3 * 700 + cached)


def test_many_requests_compute() -> None:
    machine = Machine(flops=1.0, read=1e30)
    assert least_seconds(machine, MODEL, "f32", 8, [3] * 32) == pytest.approx(32 * 2 * (8 * 1000 + 200 + 2 * 1200))


def test_finished_requests_cost_nothing() -> None:
    machine = Machine(flops=1.0, read=1e30)
    both = least_seconds(machine, MODEL, "f32", 8, [3, 1])
    assert both == pytest.approx(2 * (2 * (8 * 1000 + 200) + 2 * 1200))
