"""A model that generates is held against transformers before it is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.build_engines.decoding import reference
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.text import tokenizer_files
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel
from tests.compiled import KERNELS

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / "checkpoints" / "docstrings-llama"


@pytest.fixture(scope="module")
def library() -> Any:
    return tokenizer_files.of_library(DEMO)


def test_the_demo_computes_what_its_library_computes_and_is_compared_once(library: Any, tmp_path: Path) -> None:
    checkpoint, remembered = open_checkpoint(DEMO), tmp_path / "compared"
    said = reference.require_logits(checkpoint, library, True, remembered, KERNELS)
    assert said == "logits as transformers'"
    without_tokenizer = None
    assert reference.require_logits(checkpoint, without_tokenizer, True, remembered, KERNELS) == said


# The text fills the 512 positions that the model has.
@pytest.mark.parametrize("place", [7, 510])
def test_another_logit_is_refused_by_its_token(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    computed = DecodeModel.forward

    def wrong(model: DecodeModel, batch: StepBatch) -> torch.Tensor:
        logits, start = computed(model, batch).clone(), int(batch.starts[0])
        if start <= place < start + len(logits):
            logits[place - start, 3] += 10 * float(logits.abs().max())
        return logits

    monkeypatch.setattr(DecodeModel, "forward", wrong)
    remembered = tmp_path / "compared"
    said = rf"behind token {place} \('.*'\) a logit differs by .* from transformers'"
    with pytest.raises(UnsupportedError, match=said):
        reference.require_logits(open_checkpoint(DEMO), library, True, remembered, KERNELS)
    assert not remembered.exists()


def test_what_is_too_large_for_a_comparison_is_said(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "available_mb", lambda: 10.0)
    said = reference.require_logits(open_checkpoint(DEMO), library, True, tmp_path / "compared", KERNELS)
    assert said.startswith("not compared with transformers: ") and said.endswith(" MiB needed, 10 MiB available")
