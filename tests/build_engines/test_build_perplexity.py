"""What `make engines` says of quantised weights, and that our own demo stays within the bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shapeshift.build_engines.decoding import perplexity
from shapeshift.build_engines.decoding.perplexity import MOST_MORE, Perplexity
from shapeshift.engines import hardware
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.build_engines.test_build_decode import Project, project
from tests.compiled import KERNELS
from tests.engines import gguf_models
from tests.engines.gguf_models import all_linears

DEMO = Path(__file__).resolve().parents[2] / "checkpoints" / "docstrings-llama"
TEXT = "Return the number of items in a container. " * 8

__all__ = ["project"]


@pytest.fixture(scope="module")
def plain() -> float:
    return perplexity.measure(open_checkpoint(DEMO), DEMO / perplexity.TEXT, True, KERNELS, "f32", 0)


@pytest.mark.parametrize(("precision", "group_size"), [("int8", 0), ("int4", 128), ("int4", 32)])
def test_the_demo_loses_little(plain: float, precision: str, group_size: int) -> None:
    text = DEMO / perplexity.TEXT
    found = perplexity.measure(open_checkpoint(DEMO), text, True, KERNELS, precision, group_size)
    assert 100 < plain < 115, "a text that the demo was not trained on"
    assert found != plain
    assert Perplexity(found, plain, "f32").more < MOST_MORE[precision]


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_a_cache_in_int8_loses_little(plain: float, precision: str) -> None:
    text = DEMO / perplexity.TEXT
    found = perplexity.measure(open_checkpoint(DEMO), text, True, KERNELS, precision, 0, "int8")
    assert found != plain and Perplexity(found, plain, "f32").more < 0.002


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    """Of a text of one window and a part, whose first token is context alone."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    text = tmp_path / "text.txt"
    text.write_text((DEMO / perplexity.TEXT).read_text()[:2600])
    ids = torch.tensor(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text.read_text()).ids)
    assert len(ids) > perplexity.WINDOW + 100
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for window in torch.split(ids, perplexity.WINDOW):
        with torch.inference_mode():
            loss = model(window[None], labels=window[None]).loss
        total, count = total + float(loss) * (len(window) - 1), count + len(window) - 1
    expected = float(torch.tensor(total / count).exp())
    found = perplexity.measure(open_checkpoint(DEMO), text, True, KERNELS, "f32", 0)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_loss_beyond_the_bound_is_a_warning() -> None:
    own = FusedDecodeSettings("x", precision="int4")
    assert Perplexity(104.9, 100.0, "f32").line(own, Path("a/t.txt")) == "perplexity 104.90 on t.txt, +4.9% against f32"
    line = Perplexity(105.1, 100.0, "f32").line(own, Path("t.txt"))
    assert line.startswith("WARNING: ") and line.endswith("more than 5%")


def test_make_engines_prints_it_once_measured(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.change(precision="int8")
    status, out, _ = project.make("generate")
    assert status == 0 and "int8" in out and "perplexity" not in out, "there is no text"
    (project.checkpoint / "perplexity.txt").write_text(TEXT)
    out = project.make("generate")[1]
    assert " on perplexity.txt, " in out and project.parameters()["precision"] == "int8"
    record = project.root / "build" / "perplexities.json"
    written = record.stat().st_mtime_ns
    assert project.make("generate")[1] == out.replace("generate: checked", "generate: up to date")
    assert record.stat().st_mtime_ns == written, "it is not measured again"
    monkeypatch.setattr(perplexity, "measure", lambda *given: 2.0 if given[-3] == "int8" else 1.0)
    (project.checkpoint / "perplexity.txt").write_text(TEXT * 2)
    assert "WARNING: perplexity 2.00 on perplexity.txt, +100.0% against " in project.make("generate")[1]
    measured = json.loads(record.read_text())
    assert sorted(len(values) for values in measured.values()) == [2, 2]
    monkeypatch.setattr(perplexity, "measure", lambda *given: 1.02 if given[-1] == "int8" else 1.0)
    project.change(precision="f32", kv_precision="int8")
    line = "WARNING: perplexity 1.02 on perplexity.txt, +2.0% against f32, which is more than 1%"
    assert line in project.make("generate")[1]


@pytest.mark.parametrize(("content", "says"), [("", "not empty"), ("x", "two tokens")])
def test_a_text_that_cannot_be_measured_is_refused(project: Project, content: str, says: str) -> None:
    (project.checkpoint / "perplexity.txt").write_text(content)
    project.change(precision="int4")
    status, _, err = project.make("generate")
    assert status == 1 and "perplexity.txt" in err and says in err


@pytest.mark.parametrize(
    ("precision", "weights"),
    [
        # What is no linear is bf16 where the CPU has it, and stays f32 elsewhere.
        (
            "int4",
            "14 Q4_0, 1 Q8_0 as they are; 5 F32 " if hardware.cpu_has_bf16() else "14 Q4_0, 5 F32, 1 Q8_0 as they",
        ),
        ("bf16", "14 Q4_0, 5 F32, 1 Q8_0 become bf16"),
        ("f32", "5 F32 as they are; 14 Q4_0, 1 Q8_0 become f32"),
    ],
)
def test_make_engines_says_what_becomes_of_a_gguf_file(project: Project, precision: str, weights: str) -> None:
    if precision == "bf16" and not hardware.cpu_has_bf16():
        pytest.skip("this CPU has no bf16")
    file = project.root / "files" / "small.gguf"
    file.parent.mkdir()
    gguf_models.write(file, {**all_linears("Q4_0"), "token_embd": "Q8_0"})
    (file.parent / "perplexity.txt").write_text(TEXT)
    project.change(precision=precision, checkpoint=str(file), max_length="64")
    status, out, err = project.make("generate")
    assert status == 0, err
    assert f"tensors of the file: {weights}" in out
    assert ("% against f32" in out) is (precision != "f32")
