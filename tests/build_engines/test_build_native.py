"""Engines of the provider native, from a checkpoint to the answers of a front and of its worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shapeshift.cli.main import main
from shapeshift.engines import hardware, manifest
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving import model_args
from tests.compiled import link_kernels
from tests.engines.families import save_model, save_modules
from tests.fakes import PbUtils, Request, as_served, text_request, values_of
from tests.polymorph.conftest import args_of

TEXTS = ("w1 w2 w3", "w9", "w5 w5 w7 w1")


@pytest.fixture
def build(tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that builds a front of a small model; returns the generated repository."""
    monkeypatch.chdir(tmp_path)
    link_kernels(tmp_path / "build")
    checkpoint = save_modules(save_model(tmp_path / "checkpoint", "bert"), pooling="mean")

    def make(**parameters: object) -> Path:
        small = {"provider": "native", "precision": "f32", "max_tokens": 32, "profile_file": "", "engine_threads": 2}
        folder = add_front(tmp_path / "model_repository", "front", checkpoint=checkpoint, **{**small, **parameters})
        text = (folder / "config.pbtxt").read_text().replace("dims: [ 8 ]", "dims: [ 16 ]")
        (folder / "config.pbtxt").write_text(text)
        assert main(["engines"]) == 0
        return tmp_path / "build" / "repository"

    return make


def expected_of(tmp_path: Path) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(tmp_path / "checkpoint"), device="cpu").encode(list(TEXTS), batch_size=1)


@pytest.mark.parametrize(("dynamic", "shapes"), [("true", [None]), ("false", [32])])
def test_one_engine_answers_texts_of_every_length(
    build: Callable[..., Path], tmp_path: Path, dynamic: str, shapes: list[int | None]
) -> None:
    repository = build(dynamic=dynamic)
    assert [one.tokens for one in manifest.load(tmp_path / "build" / "engines" / "front").engines] == shapes
    front = as_served(TextFront(PbUtils(), model_args.read(args_of(repository / "front"))))
    try:
        whole, longest, refused = text_request(*TEXTS), text_request("w1 " * 30), text_request("w1 " * 31)
        front.execute([whole, longest, refused])
        np.testing.assert_allclose(whole.vectors("EMBEDDING"), expected_of(tmp_path), atol=1e-5)
        assert longest.vectors("EMBEDDING").shape == (1, 16) and "at most 32" in refused.refusal()[1]
    finally:
        front.close()


def test_levels_are_of_this_provider(
    build: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = build(provider="auto", precision="int8")
    built = manifest.load(tmp_path / "build" / "engines" / "front")
    assert (built.provider, built.precision, built.note) == ("native", "int8", "")
    front = as_served(TextFront(PbUtils(), model_args.read(args_of(repository / "front"))))
    try:
        request = text_request(*TEXTS)
        front.execute([request])
        cosines = (request.vectors("EMBEDDING") * expected_of(tmp_path)).sum(axis=1)
        assert 0.99 < cosines.min() < cosines.max() < 0.999999
    finally:
        front.close()
    config = tmp_path / "model_repository" / "front" / "config.pbtxt"
    monkeypatch.setattr(hardware, "gpus", lambda: 1)
    for before, after, said in (
        ('string_value: "auto"', 'string_value: "openvino"', "precision: int8 is for text models of provider native"),
        ("kind: KIND_CPU", "kind: KIND_GPU", "precision: got 'int8'; of a front on a CPU: KIND_CPU; provider native"),
    ):
        stated = config.read_text()
        assert before in stated
        config.write_text(stated.replace(before, after))
        assert main(["engines"]) == 1
        assert said in capsys.readouterr().err
        config.write_text(stated)


def test_texts_of_deberta_share_a_call(build: Callable[..., Path], tmp_path: Path) -> None:
    """As with no other provider."""
    save_modules(save_model(tmp_path / "checkpoint", "deberta-v2"), pooling="mean")
    repository = build()
    assert manifest.load(tmp_path / "build" / "engines" / "front").packs_rows
    front = as_served(TextFront(PbUtils(), model_args.read(args_of(repository / "front"))))
    try:
        request = text_request(*TEXTS)
        front.execute([request])
        np.testing.assert_allclose(request.vectors("EMBEDDING"), expected_of(tmp_path), atol=1e-5)
    finally:
        front.close()


def test_a_worker_computes_the_same(build: Callable[..., Path], tmp_path: Path) -> None:
    repository = build(placement="resident", workers=1)
    worker = TextWorker(PbUtils(), model_args.read(args_of(repository / "front_w00")))
    try:
        ids = [np.array([2, *(4 + int(word[1:]) for word in text.split()), 3]) for text in TEXTS]
        lengths = np.array([len(one) for one in ids], np.int32)
        (answer,) = worker.execute([Request(("EMBEDDING", "STATE"), INPUT_IDS=np.concatenate(ids), LENGTHS=lengths)])
        np.testing.assert_allclose(values_of(answer)["EMBEDDING"], expected_of(tmp_path), atol=1e-5)
    finally:
        worker.close()
