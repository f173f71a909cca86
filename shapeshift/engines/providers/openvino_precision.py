"""Keeps submodules of an OpenVINO model in f32 where INFERENCE_PRECISION_HINT asks for bf16.

The CPU plugin computes an operation in f32 if the model file marks it with the runtime attribute
DisablePrecisionConversion (OpenVINO pull requests 21440 and 34311). The plugin does not copy the attribute when it
replaces an operation: a division (by a power and a product) and a matrix product with constant weights lose it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

_ATTRIBUTE = {"name": "DisablePrecisionConversion", "version": "0", "value": "dynamic:bf16,f16"}


def replace_divisions(model: Any, modules: Collection[str]) -> None:
    """Replace each division of a tensor by its norms in `modules` by operations that the plugin keeps as they are.

    A power with one exponent is replaced too. One with an exponent for each column is not.
    """
    from openvino import opset13 as operations

    for divide in model.get_ordered_ops():
        if divide.get_type_name() != "Divide" or not _is_inside(divide.get_friendly_name(), modules):
            continue
        width = divide.input(0).get_partial_shape()[-1].get_length()
        exponents = operations.constant(np.full(width, -1.0, np.float32))
        inverse = operations.power(divide.input_value(1), exponents)
        product = operations.multiply(divide.input_value(0), inverse)
        name = divide.get_friendly_name()
        inverse.set_friendly_name(f"{name}/inverse")
        product.set_friendly_name(name)
        divide.output(0).replace(product.output(0))


def mark_f32(file: Path, modules: Collection[str]) -> None:
    """Mark every operation of `modules` in the model file."""
    tree = ElementTree.parse(file)
    for layer in tree.iterfind("./layers/layer"):
        if _is_inside(layer.get("name", ""), modules):
            information = layer.find("rt_info")
            if information is None:
                information = ElementTree.SubElement(layer, "rt_info")
            ElementTree.SubElement(information, "attribute", _ATTRIBUTE)
    tree.write(file, encoding="utf-8", xml_declaration=True)


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether an operation's name, "__module.blocks.0.matching/aten::max/ReduceMax", is that of one of the modules."""
    return name.partition("/")[0].rpartition(".")[2] in modules
