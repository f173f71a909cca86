"""Export a checkpoint for OpenVINO GenAI, in its environment: `openvino_genai_export.py CHECKPOINT FOLDER WEIGHTS`.

WEIGHTS is f32 or int8: then the weights of the matrix products are compressed as by NNCF's INT8_SYM, to 8 bits with a
scale for each output.
"""

import sys
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as ops
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

MOST_LEVEL = 127


def main() -> None:
    """Export with weights in f32, or int8; the precision of the computation is chosen when the model is loaded."""
    checkpoint, folder, weights = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    exported = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
    if weights == "int8":
        compress(exported.model)
    exported.save_pretrained(folder)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")


def compress(model: openvino.Model) -> None:
    """Replace the constant weights [outputs, inputs] of all matrix products by 8-bit ones. A lookup keeps its table."""
    replaced = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() == "Convert":
            source = source.input_value(0).get_node()
        if source.get_type_name() != "Constant":
            continue
        weight = np.array(source.data, dtype=np.float32)
        scales = np.abs(weight).max(axis=1, keepdims=True) / MOST_LEVEL
        levels = ops.constant(np.round(weight / scales).astype(np.int8))
        product = ops.multiply(ops.convert(levels, "f32"), ops.constant(scales))
        node.input(1).replace_source_output(product.output(0))
        replaced += 1
    assert replaced, "no matrix product has constant weights"


if __name__ == "__main__":
    main()
