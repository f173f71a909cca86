"""Decoders that say yes or no to a pair, from a checkpoint to the scores of a front."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.cli.main import main
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from tests.engines.families import WORDS, save_model
from tests.fakes import PbUtils, Request, TritonError, as_served
from tests.polymorph.conftest import args_of

QUERIES, DOCUMENTS = ("w1 w2", "w9", "w5 w5 w7"), ("w3 w4 w5", "w1 w2 w9 w9", "w8")
TEMPLATE = (
    "{%- for m in messages if m.role == 'system' %}w10 {{ m.content }} {% endfor -%}"
    "w11 {{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    " w12 {{ (messages | selectattr('role', 'eq', 'document') | first).content }} w13 w14"
)


def save_reranker(folder: Path, template: str = TEMPLATE) -> Path:
    """A small random Qwen3 whose tokenizer has yes and no in place of the last words."""
    save_model(folder, "qwen3", "AutoModelForCausalLM", tie_word_embeddings=True)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for word, answer in ((WORDS - 1, "yes"), (WORDS - 2, "no")):
        text = text.replace(f'"w{word}"', f'"{answer}"')
    # A causal model's tokenizer adds nothing to what a template writes.
    file.write_text(json.dumps({**json.loads(text), "post_processor": None}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TextFront]]:
    """A function that builds a model of the repository and opens its front."""
    monkeypatch.chdir(tmp_path)
    opened: list[TextFront] = []

    def serve(name: str, **parameters: str) -> TextFront:
        config = Path("model_repository") / name / "config.pbtxt"
        text = config.read_text().replace(
            '"max_tokens" value { string_value: "64"', '"max_tokens" value { string_value: "24"'
        )
        for key, value in {"bins": "none", "precision": "f32", **parameters}.items():
            text = text.replace("parameters [", f'parameters [ {{ key: "{key}" value {{ string_value: "{value}" }} }},')
        config.write_text(text)
        assert main(["engines", name]) == 0
        front = TextFront(PbUtils(), model_args.read(args_of(tmp_path / "build" / "repository" / name)))
        opened.append(as_served(front))
        return opened[-1]

    yield serve
    for front in opened:
        front.close()


def pairs(
    *, outputs: tuple[str, ...] = ("LOGITS",), documents: tuple[str, ...] = DOCUMENTS, **parameters: Any
) -> Request:
    columns = [np.array([[text.encode()] for text in texts], dtype=object) for texts in (QUERIES, documents)]
    return Request(["LOGITS"], parameters=parameters, TEXT=columns[0], TEXT_PAIR=columns[1])


def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, served: Callable[..., TextFront]) -> None:
    from sentence_transformers import CrossEncoder
    from torch import nn

    plain = save_reranker(tmp_path / "plain")
    prompts = {"web": "w20 w21", "code": "w30"}
    CrossEncoder(str(plain), device="cpu", prompts=prompts, default_prompt_name="web").save_pretrained(
        str(tmp_path / "ranker")
    )
    library = CrossEncoder(str(tmp_path / "ranker"), device="cpu", local_files_only=True)
    assert main(["add", str(tmp_path / "ranker")]) == 0
    front = served("ranker")
    long = tuple(f"{text} " + "w7 w9 " * 12 for text in DOCUMENTS)
    whole, code, cut = pairs(), pairs(prompt_name="code"), pairs(documents=long, truncate=True)
    alone, unknown, asked = pairs(), pairs(prompt_name="law"), Request(("DESCRIPTION",))
    del alone.tensors["TEXT_PAIR"]
    too_long = pairs(documents=long)
    front.execute([whole, code, cut, alone, unknown, asked, too_long])

    def expected(documents: tuple[str, ...] = DOCUMENTS, **options: Any) -> Any:
        texts = list(zip(QUERIES, documents, strict=True))
        return library.predict(texts, batch_size=1, activation_fn=nn.Identity(), **options)[:, None]

    np.testing.assert_allclose(whole.vectors("LOGITS"), expected(), atol=1e-4)
    np.testing.assert_allclose(code.vectors("LOGITS"), expected(prompt_name="code"), atol=1e-4)
    assert np.ptp(expected()) > 0.1 and np.abs(expected() - expected(prompt_name="code")).max() > 0.01
    # Of 24 tokens the template has 7; what stands behind the document stays.
    fitting = [" ".join(text.split()[: 17 - len(query.split())]) for query, text in zip(QUERIES, long, strict=True)]
    np.testing.assert_allclose(cut.vectors("LOGITS"), expected(tuple(fitting)), atol=1e-4)
    assert alone.refusal() == (TritonError.INVALID_ARG, "TEXT_PAIR: got None; given: this model reads pairs")
    assert "parameter prompt_name: got 'law'; one of the model's prompts: code, web" in unknown.refusal()[1]
    assert "tokens'; at most 24" in too_long.refusal()[1]
    said = json.loads(asked.vectors("DESCRIPTION").item())
    assert (said["kind"], said["only_pairs"], said["activation"]) == ("reranking", True, "sigmoid")


def test_a_template_of_ones_own(
    tmp_path: Path, served: Callable[..., TextFront], capsys: pytest.CaptureFixture[str]
) -> None:
    """As for Qwen3-Reranker as its authors publish it, whose chat template is that of conversations."""
    from sentence_transformers import CrossEncoder

    generic = "{%- for m in messages if m.role == 'user' %}{{ m.content }}{% endfor -%}"
    folder = save_reranker(tmp_path / "plain", generic)
    model = Path("model_repository") / "own"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        'name: "own"\nbackend: "polymorph"\ninput [ { name: "TEXT_PAIR" } ]\noutput [ { name: "LOGITS" } ]\n'
        f'parameters [ {{ key: "checkpoint" value {{ string_value: "{folder}" }} }},'
        ' { key: "max_tokens" value { string_value: "48" } } ]\n'
    )
    assert main(["engines", "own"]) == 1
    assert "pair_template: the chat template of" in capsys.readouterr().err
    (model / "pairs.jinja").write_text(TEMPLATE)
    front = served("own", pair_template="pairs.jinja")
    request = pairs()
    front.execute([request])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    scores = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(
        list(zip(QUERIES, DOCUMENTS, strict=True)), batch_size=1
    )
    np.testing.assert_allclose(1 / (1 + np.exp(-request.vectors("LOGITS")[:, 0])), scores, atol=1e-5)
