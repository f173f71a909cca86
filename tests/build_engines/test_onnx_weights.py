"""The weights in ONNX files: names and shapes are those of the module that was exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shapeshift.build_engines.onnx_weights import initializers
from shapeshift.engines.providers.onnx_export import MODEL_FILE, export_onnx
from shapeshift.errors import InvalidInputError


class Attention(nn.Module):
    """A layer with a bias, one without, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 6)
        self.key = nn.Linear(4, 6, bias=False)
        self.mix = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3, bias=False))
        self.norms = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(self.query(values) + self.key(values))
        for norm in self.norms:
            mixed = norm(mixed)
        return mixed


class Encoder(nn.Module):
    input_axes = {"ids": {1: "tokens"}}
    output_names = ("vectors",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.layer = nn.ModuleList([Attention()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.layer[0](self.words(ids))
        return vectors


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """An exported file, and the tensors of its module."""
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    module = Encoder().eval()
    folder = tmp_path_factory.mktemp("onnx")
    export_onnx(module, {"ids": np.arange(5)[None]}, folder)
    return folder / MODEL_FILE, module.state_dict()


def test_names_and_values_are_those_of_the_module(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file, expected = exported
    import onnx

    stored = {one.name for one in onnx.load(str(file)).graph.initializer}
    assert any(name.startswith("onnx::MatMul") for name in stored), "the exporter renames weights"
    assert len(stored) < len(expected), "the exporter stores equal tensors once"
    weights = initializers(file)
    assert sorted(weights) == sorted(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights[name], tensor.numpy(), err_msg=name)


def test_a_gemm_keeps_the_orientation_that_it_states(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "onnx::Gemm_1", "up.bias"], ["y"], transB=1),
        onnx.helper.make_node("Gemm", ["y", "onnx::Gemm_2", "down.bias"], ["z"]),
    ]
    tensors = {"onnx::Gemm_1": weight, "onnx::Gemm_2": weight, "up.bias": weight[:, 0], "down.bias": weight[0]}
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, None]) for name in "xz"]
    stored = [onnx.numpy_helper.from_array(tensor, name) for name, tensor in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[1:], stored)
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "model.onnx"))
    weights = initializers(tmp_path / "model.onnx")
    np.testing.assert_array_equal(weights["up.weight"], weight)
    np.testing.assert_array_equal(weights["down.weight"], weight.T)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [shorten, lambda file: file.write_text("not a model"), Path.unlink])
def test_a_file_that_is_not_whole_is_refused(
    exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(exported[0].read_bytes())
    damage(file)
    with pytest.raises(InvalidInputError, match="a whole ONNX file"):
        initializers(file)
