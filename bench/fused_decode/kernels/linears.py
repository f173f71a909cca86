"""`python -m bench.fused_decode.kernels.linears`: the linears of all layers, by kind of weights and number of rows.

Random weights of the shapes of the Llama of 110 million parameters: more than caches hold. The kinds take turns on one
thread, and times are processor time. A kind with `@` and instructions, as in int4-32@quads, is computed by these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from bench.common.output import BUILD, Output, progress
from bench.fused_decode.kernels.turns import in_turns
from shapeshift.fused_decode.model import kernel_build

KERNELS = BUILD / "kernels"
ROWS = (1, 4, 9, 16, 32, 200)
KINDS = {"bf16": (16, 0), "int8": (8, 0), "int4-128": (4, 128), "int4-32": (4, 32)}
"""Bits of a weight, and inputs of an output that share a scale; 0: all."""
SHAPES = ((2304, 768), (768, 768), (4096, 768), (768, 2048))
"""Outputs and inputs of the linears of a layer."""
LAYERS = 12
_SIDE = 1024


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="the first one is compared with")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args(arguments)
    kernel_build.limit_spinning()
    import torch

    torch.set_num_threads(1)
    output = Output("fused_decode.kernels.linears", vars(options), "fused_decode-linears")
    square = torch.randn(_SIDE, _SIDE).bfloat16()
    peak = 2 * _SIDE**3 / in_turns({"": lambda: torch.mm(square, square)}, options.turns)[0][""] / 1e6
    output.say(f"  torch's product of {_SIDE} x {_SIDE} in bf16: {peak:.0f} GFLOP/s\n")
    linears = {kind: _linears(kind, options.layers) for kind in options.kinds}
    weights = options.layers * sum(outputs * inputs for outputs, inputs in SHAPES)
    output.say(f"  {'rows':>5}" + "".join(f"{kind:>22}" for kind in linears) + "   ms, speed over the first, GFLOP/s")
    cells = []
    for rows in options.rows:
        progress(f"{rows} rows")
        works = {kind: _all_of(own, rows) for kind, own in linears.items()}
        found, foreign = in_turns(works, options.turns)
        first = next(iter(found.values()))
        columns = [f"{ms:9.2f}{first / ms:6.2f}{2 * rows * weights / ms / 1e6:7.0f}" for ms in found.values()]
        output.say(f"  {rows:>5}" + "".join(columns) + f"   (other processes: {foreign:.2f} cores)")
        cells.append({"rows": rows, "ms": found, "foreign": foreign})
    output.data |= {"cells": cells, "peak": peak}
    output.save()
    return 0


def _linears(kind: str, layers: int) -> list[Any]:
    import torch

    from shapeshift.fused_decode.model import native_operations
    from shapeshift.fused_decode.model.native_operations import NativeLevelLinear, NativeLinear
    from shapeshift.fused_decode.model.quantised.levels import quantise

    native_operations.load(KERNELS, print)
    name, _, instructions = kind.partition("@")
    bits, group = KINDS[name]

    def linear(outputs: int, inputs: int) -> Any:
        weight = torch.randn(outputs, inputs)
        if bits == 16:
            return NativeLinear(weight.bfloat16(), None, instructions or "best")
        return NativeLevelLinear(quantise(weight, bits, group), None, instructions or "best")

    return [linear(*shape) for _ in range(layers) for shape in SHAPES]


def _all_of(linears: list[Any], rows: int) -> Callable[[], None]:
    import torch

    given = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs in SHAPES}
    inputs = [own for _, own in SHAPES]

    def run() -> None:
        for number, linear in enumerate(linears):
            linear(given[inputs[number % len(inputs)]])

    return run


if __name__ == "__main__":
    sys.exit(main())
