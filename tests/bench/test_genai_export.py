"""Weights of few bits for OpenVINO GenAI: what they stand for, and which products have them."""

from __future__ import annotations

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

from bench.peers.openvino_genai_export import GROUP, compress

INPUTS, INNER, OUTPUTS = 2 * GROUP, GROUP, 48


def model() -> openvino.Model:
    """A layer's product and, last, that of the head."""
    rng = np.random.default_rng(0)
    rows = ops.parameter([-1, INPUTS], np.float32, name="rows")
    layer, head = (rng.normal(size=shape).astype(np.float32) for shape in ((INNER, INPUTS), (OUTPUTS, INNER)))
    inner = ops.matmul(rows, ops.constant(layer), False, True)
    return openvino.Model([ops.matmul(inner, ops.constant(head), False, True), inner], [rows])


@pytest.mark.parametrize(("bits", "layer", "head"), [(8, 0.01, 0.02), (4, 0.15, 0.2)])
def test_products_keep_their_results_within_the_levels(bits: int, layer: float, head: float) -> None:
    rows = np.random.default_rng(1).normal(size=(4, INPUTS)).astype(np.float32)
    exact = openvino.compile_model(model(), "CPU")(rows)
    compressed = model()
    compress(compressed, bits)
    constants = [node for node in compressed.get_ordered_ops() if node.get_type_name() == "Constant"]
    kinds = [node.get_element_type() for node in constants]
    assert kinds.count(openvino.Type.i8) == (2 if bits == 8 else 1)
    assert kinds.count(openvino.Type.i4) == (0 if bits == 8 else 1)
    result = openvino.compile_model(compressed, "CPU", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})(rows)
    for output, bound in ((1, layer), (0, head)):
        error = np.abs(result[output] - exact[output]).mean() / np.abs(exact[output]).mean()
        assert 0 < error < bound


def test_a_model_without_products_is_refused() -> None:
    rows = ops.parameter([-1, 4], np.float32)
    with pytest.raises(AssertionError, match="no matrix product"):
        compress(openvino.Model([ops.relu(rows)], [rows]), 8)
