"""BERT-Base and a Llama behind one Triton: our fronts against a plain Python backend over transformers.

Both systems are loaded and take turns. `texts`: closed loops of texts of one length to the BERT. `at once`: so many
prompts of 32 tokens to the Llama, with answers of equal length; ours streams, while the plain backend answers when its
batch has ended, so that its first token comes with its last. The plain backend has Triton's dynamic batcher.

It needs what `make setup` installs; without it nothing is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common.output import BUILD
from bench.gpu.decode import ONE_BILLION, TINY
from bench.gpu.device import Device
from bench.gpu.engines import bert
from bench.gpu.part import Part, Row
from bench.gpu.random_models import Shape

if TYPE_CHECKING:
    from bench.common.cells import Cells

_OF_TEXTS = {"per_second": "texts/s", "p50_ms": "p50 ms", "failed": "failed"}
_OF_TOKENS = {"tokens_per_second": "tokens/s", "first_token_ms": "first token ms"}


@dataclass(frozen=True)
class Sizes:
    """lengths: of texts; in_flight: clients, and prompts at once; texts: of a closed loop; new_tokens: of an answer."""

    bert: Shape
    llama: Shape
    lengths: tuple[int, ...]
    in_flight: tuple[int, ...]
    texts: int
    new_tokens: int
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    if not (BUILD / "triton").is_dir() or importlib.util.find_spec("tritonclient") is None:
        yield {"not measured": f"no server in {BUILD / 'triton'}, or no package tritonclient: run `make setup`"}
        return
    # These need the packages of `make setup`.
    from bench.common import texts
    from bench.common.cells import Cells
    from bench.fused_decode import loads
    from bench.gpu import behind_triton
    from bench.gpu.checkpoints import LETTERS

    rng = np.random.default_rng(seed)
    encoding, decoding = Cells(texts.figures, seed), Cells(loads.figures, seed)
    with behind_triton.served(device, sizes.bert, sizes.llama, sizes.new_tokens, seed) as served:
        for length in sizes.lengths:
            drawn = ["".join(rng.choice(list(LETTERS), length)) for _ in range(sizes.texts)]
            for clients in sizes.in_flight:
                loops = {
                    name: partial(one.closed, drawn, clients, sizes.texts) for name, one in served.encoders.items()
                }
                shown = _in_turn(encoding, f"{length} tokens, {clients} in flight", loops, sizes.rounds, _OF_TEXTS)
                yield {"model": "bert", "kind": "texts", "tokens": length, "in flight": clients} | shown
        generator = loads.LoadGenerator(seed, served.letters, sizes.new_tokens)
        for count in sizes.in_flight:
            load = generator.at_once(count)
            replays = {name: partial(one.replay, load) for name, one in served.generators.items()}
            shown = _in_turn(decoding, load.name, replays, sizes.rounds, _OF_TOKENS)
            yield {"model": "llama", "kind": "at once", "tokens": sizes.new_tokens, "in flight": count} | shown


def _in_turn(
    cells: Cells[Any], load: str, runs: Mapping[str, Callable[[], Any]], rounds: int, shown: Mapping[str, str]
) -> Row:
    """The figures of each system, and the ratio of the first one, after a run that is not measured.

    shown: the column of each figure.
    """
    for run in runs.values():
        run()
    cells.measure(load, runs, rounds)
    ours, plain = runs
    row = {f"{system}, {shown[name]}": round(cells.figure(load, system, name), 2) for name in shown for system in runs}
    return row | {f"{ours} / {plain}": round(cells.over(load, ours, plain, next(iter(shown))), 2)}


PART = Part(
    "BERT-Base and a Llama of 1B behind Triton, against a plain Python backend over transformers",
    measure,
    Sizes(bert(12, 768, 12), ONE_BILLION, (16, 128), (1, 8, 32), texts=400, new_tokens=128, rounds=3),
    Sizes(bert(2, 32, 2), TINY, (16,), (1, 2), texts=6, new_tokens=8, rounds=1),
    minutes=5.0,
)
