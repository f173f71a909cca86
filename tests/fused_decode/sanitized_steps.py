"""Steps by the kernels of a GPU, for compute-sanitizer: `python -m tests.fused_decode.sanitized_steps cuda:0`.

Without graphs, so that torch can allocate each tensor by itself (PYTORCH_NO_CUDA_MEMORY_CACHING): a write beyond one is
then seen. On a CPU the same steps run in plain torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from shapeshift.adapter_cache.lora import grouped_loading
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from tests.fused_decode.decode_models import LONGEST, make, teacher_forced, texts

ENDED = "every step was finite"
_SLOTS = 4


def run(device: str, families: tuple[str, ...] = ("llama", "qwen3")) -> None:
    """Texts that join and leave; then the terms of some adapters."""
    said = list[str]()
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            tiny = make(family, Path(folder))
            model = GraphedModel.load_on(
                device, tiny.folder, precision="f32", slots=_SLOTS, max_length=LONGEST, log=said.append
            )
        assert not said, said
        model.uses_graphs = False
        for _, _, logits in teacher_forced(model, texts(_SLOTS, seed=21), [2, 0, 3, 1], seed=22):
            assert bool(logits.isfinite().all())
    made = grouped_loading.load(33, torch.zeros(1, device=device), said.append)
    assert made is not None, said
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    run(sys.argv[1])
    print(ENDED)  # noqa: T201  what the test looks for
