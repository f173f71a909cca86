"""`python -m bench.fused_decode.kernels.steps`: steps of decoding, and whole prompts, by precision.

Llama of 110 million random parameters. The precisions take turns on one thread, and times are processor time: of a
step of 1, 8 and 32 requests after 100 tokens each, and of prompts until the logits of their first token, in pieces of
as many tokens as an iteration takes by default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from bench.common.output import BUILD, FOLDER, Output, progress
from bench.fused_decode.kernels.turns import in_turns
from bench.peers import random_llama
from shapeshift.fused_decode.model import kernel_build
from shapeshift.fused_decode.settings import FusedDecodeSettings

PRECISIONS = {"bf16": ("bf16", 0), "int8": ("int8", 0), "int4-128": ("int4", 128), "int4-32": ("int4", 32)}
"""`precision` and `group_size`."""
ROWS = (1, 8, 32)
CONTEXT = 100
PROMPTS = ((1, 32), (1, 200), (1, 512), (8, 32))
"""Prompts that begin together, and tokens of each."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--times", type=int, default=2, help="timed steps of a turn")
    options = parser.parse_args(arguments)
    # Before torch is imported.
    kernel_build.limit_spinning()
    output = Output("fused_decode.kernels.steps", vars(options), "fused_decode-steps")
    models = {name: _load(*PRECISIONS[name]) for name in options.precisions}
    output.say(f"  {'':24}" + "".join(f"{name:>18}" for name in models) + "   ms; speed over the first")
    cells = []
    for name, steps in _cells().items():
        progress(name)
        works = {own: partial(_run, model, steps) for own, model in models.items()}
        found, foreign = in_turns(works, options.turns, options.times)
        first = next(iter(found.values()))
        columns = [f"{ms:12.1f}{first / ms:6.2f}" for ms in found.values()]
        output.say(f"  {name:24}" + "".join(columns) + f"   (other processes: {foreign:.2f} cores)")
        cells.append({"what": name, "ms": found, "foreign": foreign})
    output.data |= {"cells": cells}
    output.save()
    return 0


def _load(precision: str, group_size: int) -> Any:
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel

    return DecodeModel.load(
        random_llama.ensure(FOLDER / "llama-110m"),
        precision=precision,
        group_size=group_size,
        slots=max(ROWS),
        max_length=max(length for _, length in PROMPTS),
        threads=1,
        cache_dir=BUILD / "kernels",
    )


def _cells() -> Mapping[str, list[Any]]:
    """The steps of each row of the table."""
    decoding = {f"step of {rows}": [step(rows, CONTEXT, 1)] for rows in ROWS}
    return decoding | {f"prompts: {rows} of {length}": prompts(rows, length) for rows, length in PROMPTS}


def prompts(rows: int, length: int, most: int = FusedDecodeSettings.prefill_tokens) -> list[Any]:
    """The steps of `rows` prompts of `length` tokens: at most `most` tokens in each, as the loop takes them."""
    piece = most // rows
    return [step(rows, start, min(piece, length - start)) for start in range(0, length, piece)]


def step(rows: int, start: int, length: int) -> Any:
    """`length` tokens of each of `rows` requests, after `start` tokens."""
    import torch

    from shapeshift.fused_decode.interfaces import StepBatch

    return StepBatch(
        tokens=torch.arange(rows * length) + 100,
        slots=torch.arange(rows, dtype=torch.int32),
        starts=torch.full((rows,), start, dtype=torch.int32),
        lengths=torch.full((rows,), length, dtype=torch.int32),
        wanted=torch.arange(rows),
    )


def _run(model: Any, steps: list[Any]) -> None:
    for own in steps:
        model.forward(own)


if __name__ == "__main__":
    sys.exit(main())
