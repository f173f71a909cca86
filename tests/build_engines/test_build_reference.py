"""A model that generates is held against transformers before it is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.build_engines.decoding import reference
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.errors import UnsupportedError

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / "checkpoints" / "docstrings-llama"
KERNELS = PROJECT / "build" / "kernels"


def test_the_demo_computes_what_its_library_computes_and_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, remembered = open_checkpoint(DEMO), tmp_path / "compared"
    said = reference.require_logits(checkpoint, True, remembered, KERNELS)
    assert said == "logits as transformers'"
    monkeypatch.setattr(reference, "_compared", lambda *_: pytest.fail("it was compared before"))
    assert reference.require_logits(checkpoint, True, remembered, KERNELS) == said


def test_another_logit_is_refused_by_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = reference._of_ours

    def wrong(*args: object) -> object:
        logits = ours(*args)  # type: ignore[arg-type]
        logits[7, 3] += 0.01 * float(logits.abs().max())
        return logits

    monkeypatch.setattr(reference, "_of_ours", wrong)
    remembered = tmp_path / "compared"
    with pytest.raises(UnsupportedError, match=r"behind token 7 \('.*'\) a logit differs by .* from transformers'"):
        reference.require_logits(open_checkpoint(DEMO), True, remembered, KERNELS)
    assert not remembered.exists()


def test_what_is_too_large_for_a_comparison_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "available_mb", lambda: 10.0)
    said = reference.require_logits(open_checkpoint(DEMO), True, tmp_path / "compared", KERNELS)
    assert said.startswith("not compared with transformers: ") and said.endswith(" MiB needed, 10 MiB available")
