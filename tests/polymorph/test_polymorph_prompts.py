"""Prompts of a checkpoint, chosen by the request parameter prompt_name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shapeshift.polymorph.front import TextFront
from shapeshift.triton import model_config
from tests.fakes import TritonError, ids_request, text_request


@pytest.fixture
def checkpoint(tmp_path: Path, light_checkpoint: Path) -> Path:
    """A checkpoint with two prompts, of which one is for requests that name none."""
    folder = tmp_path / "prompted"
    shutil.copytree(light_checkpoint, folder)
    types = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in types]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    prompts = {"prompts": {"query": "find: ", "passage": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_the_prompt_is_put_before_each_text(
    make_front: Callable[..., TextFront], checkpoint: Path, tmp_path: Path
) -> None:
    front = make_front(checkpoint=checkpoint)
    texts = ("one", "two words")
    whole = text_request(*("find: " + text for text in texts), parameters={"prompt_name": "passage"})
    named = text_request(*texts, parameters={"prompt_name": "query"})
    default, bare = text_request(*texts), text_request(*texts, parameters={"prompt_name": "passage"})
    front.execute([whole, named, default, bare])
    np.testing.assert_array_equal(named.vectors(), whole.vectors())
    np.testing.assert_array_equal(default.vectors(), whole.vectors())
    assert not np.array_equal(bare.vectors(), whole.vectors())
    generated = model_config.parameters(model_config.read(tmp_path / "build/repository/front/config.pbtxt"))
    assert (generated["pooling"], generated["normalize"]) == ("cls", "false")
    assert json.loads(generated["prompts"]) == {"query": "find: ", "passage": ""}


def test_a_prompt_that_cannot_be_put_is_refused(make_front: Callable[..., TextFront], checkpoint: Path) -> None:
    front = make_front(checkpoint=checkpoint)
    unknown = text_request("one", parameters={"prompt_name": "search"})
    ids = ids_request([101, 102], parameters={"prompt_name": "query"})
    plain = ids_request([101, 102])
    front.execute([unknown, ids, plain])
    assert unknown.refusal() == (
        TritonError.INVALID_ARG,
        "parameter prompt_name: got 'search'; one of the model's prompts: query, passage",
    )
    assert ids.refusal() == (
        TritonError.INVALID_ARG,
        "parameter prompt_name: got 'query'; only with TEXT; INPUT_IDS are taken as they are",
    )
    assert plain.vectors().shape == (1, 8)


def test_a_model_without_prompts_says_so(make_front: Callable[..., TextFront]) -> None:
    request = text_request("one", parameters={"prompt_name": "query"})
    make_front().execute([request])
    assert request.refusal()[1].endswith("got 'query'; not given: this model has no prompts")
