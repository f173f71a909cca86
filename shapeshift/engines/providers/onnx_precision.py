"""Lowers the products of an ONNX graph to 16 bits: the precision of a strongly typed network stands in its types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# What multiplies: it takes nearly all of the time. Sums, softmax and norms stay in f32.
_PRODUCTS = {"MatMul", "Gemm", "Conv"}
# Of the weights in a file that protobuf can write.
_MOST_BYTES = 2**31 - 2**24


def lower(file: Path, precision: str, in_f32: Sequence[str] = ()) -> None:
    """Compute the products of the graph in `file` in "bf16" or "f16", in place; weights are stored so.

    in_f32: modules whose products stay in f32. torch's tracing exporter cannot do this: of a module in 16 bits it
    writes types of its own that no reader takes.
    """
    import onnx
    import torch
    from onnx import TensorProto, helper, numpy_helper

    low, dtype = {"bf16": (TensorProto.BFLOAT16, torch.bfloat16), "f16": (TensorProto.FLOAT16, torch.float16)}[
        precision
    ]
    model = onnx.load(str(file))
    graph = model.graph
    # Types need no weights: those of more than 2 GB, which torch writes beside the graph, cannot be passed on.
    bare = onnx.load(str(file), load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(bare).graph
    beside = {one.value for weight in bare.graph.initializer for one in weight.external_data if one.key == "location"}
    types = {one.name: one.type.tensor_type.elem_type for one in (*inferred.value_info, *inferred.input)}
    weights = {one.name: one for one in graph.initializer}
    types |= {name: one.data_type for name, one in weights.items()}
    lowered: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        is_kept = any(f"/{name}/" in node.name for name in in_f32)
        if node.op_type not in _PRODUCTS or is_kept or types.get(node.output[0]) != TensorProto.FLOAT:
            nodes.append(node)
            continue
        for place, name in enumerate(node.input):
            if name and name not in lowered:
                lowered[name] = f"{name}/{precision}"
                if name in weights:
                    values = torch.from_numpy(numpy_helper.to_array(weights[name]).copy()).to(dtype)
                    content = values.view(torch.int16).numpy().tobytes()
                    shape = list(values.shape)
                    graph.initializer.append(helper.make_tensor(lowered[name], low, shape, content, raw=True))
                else:
                    nodes.append(helper.make_node("Cast", [name], [lowered[name]], lowered[name], to=low))
            node.input[place] = lowered.get(name, name)
        result = node.output[0]
        node.output[0] = f"{result}/{precision}"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [result], f"{result}/f32", to=TensorProto.FLOAT)]
    used = {name for node in nodes for name in node.input}
    stored = [one for one in graph.initializer if one.name in used]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(stored)
    for name in beside:
        (file.parent / name).unlink()
    is_large = sum(len(weight.raw_data) for weight in stored) > _MOST_BYTES
    onnx.save(model, str(file), save_as_external_data=is_large, location=f"{file.name}.data")
