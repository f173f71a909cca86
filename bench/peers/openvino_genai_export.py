"""Export a checkpoint for OpenVINO GenAI, in its environment: `openvino_genai_export.py FROM FOLDER WEIGHTS`.

WEIGHTS is f32: FROM is a checkpoint. Or it is int8 or int4, and FROM a folder exported in f32: then the weights of the
matrix products are compressed as by NNCF, symmetrically. int8: to 8 bits with a scale for each output (INT8_SYM). int4:
to 4 bits with a scale for each GROUP inputs of an output (INT4_SYM), the output head to 8 bits.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13 as ops

Weight = NDArray[np.float32]
MODEL = "openvino_model"
GROUP = 128


def main() -> None:
    """Export; the precision of the computation is chosen when the model is loaded."""
    source, folder, weights = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if weights == "f32":
        export(source, folder)
        return
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(f"{MODEL}.*"), dirs_exist_ok=True)
    model = openvino.Core().read_model(source / f"{MODEL}.xml")
    compress(model, 4 if weights == "int4" else 8)
    openvino.save_model(model, folder / f"{MODEL}.xml", compress_to_fp16=False)


def export(checkpoint: Path, folder: Path) -> None:
    """The model with its weights in f32, and its tokenizer."""
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    exported = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
    exported.save_pretrained(folder)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")


def compress(model: openvino.Model, bits: int) -> None:
    """Compress the constant weights [outputs, inputs] of all matrix products. A lookup keeps its table."""
    products = []
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() == "Convert":
            source = source.input_value(0).get_node()
        if source.get_type_name() == "Constant":
            products.append((node, source))
    assert products, "no matrix product has constant weights"
    for node, source in products:
        weight = np.array(source.data, dtype=np.float32)
        # The last product is the output head.
        product = grouped(weight) if bits == 4 and node is not products[-1][0] else whole(weight)
        node.input(1).replace_source_output(product.output(0))


def whole(weight: Weight) -> openvino.Node:
    """The weight in levels of 8 bits, with a scale for each output."""
    scales = np.abs(weight).max(axis=1, keepdims=True) / 127
    levels = ops.constant(np.round(weight / scales).astype(np.int8))
    return ops.multiply(ops.convert(levels, "f32"), ops.constant(scales))


def grouped(weight: Weight) -> openvino.Node:
    """The weight in levels of 4 bits, -8 to 7, with a scale for each GROUP inputs of an output."""
    groups = weight.reshape(len(weight), -1, GROUP)
    # What is furthest from 0 becomes -8.
    furthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)
    scales = furthest / -8
    levels = np.clip(np.round(groups / scales), -8, 7).astype(np.int8).view(np.uint8) & 15
    packed = levels[..., 0::2] | levels[..., 1::2] << 4
    tensor = openvino.Tensor(packed, openvino.Shape(groups.shape), openvino.Type.i4)
    constant = openvino.op.Constant(tensor, shared_memory=False)
    product = ops.multiply(ops.convert(constant, "f32"), ops.constant(scales))
    return ops.reshape(product, ops.constant(np.array(weight.shape, np.int64)), special_zero=False)


if __name__ == "__main__":
    main()
