"""The folders of sentence-transformers, read without torch: what is served, and what is refused with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.errors import InvalidInputError, ShapeshiftError

TYPES = {kind: f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")}
DENSE = {"in_features": 8, "out_features": 3, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a folder of these modules: a config for each, by kind, and the other files' content."""

    def make(*kinds: str, pooling: Any = None, dense: Any = None, **files: Any) -> Path:
        configs = {"Pooling": pooling or {"pooling_mode": "cls"}, "Dense": dense or DENSE}
        listed = []
        for number, kind in enumerate(kinds):
            path = f"{number}_{kind}" if number else ""
            (tmp_path / path).mkdir(exist_ok=True)
            if kind in configs:
                (tmp_path / path / "config.json").write_text(json.dumps(configs[kind]))
            if kind == "Dense":
                (tmp_path / path / "model.safetensors").write_bytes(b"weights")
            listed.append({"idx": number, "name": str(number), "path": path, "type": TYPES.get(kind, kind)})
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def test_a_folder_without_modules_says_nothing(tmp_path: Path) -> None:
    assert sentence_modules.read(tmp_path) == SentenceModules()
    assert SentenceModules().resolved("auto", "auto", "lasttoken") == SentenceModules(("lasttoken",), True)
    assert SentenceModules().resolved("cls", "false", "mean") == SentenceModules(("cls",), False)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "cls", "embedding_dimension": 8}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        # The library's default where no flag is set.
        ({"word_embedding_dimension": 8}, ("mean",)),
    ],
)
def test_the_pooling_is_read(write: Callable[..., Path], config: Any, pooling: tuple[str, ...]) -> None:
    found = sentence_modules.read(write("Transformer", "Pooling", pooling=config))
    assert (found.pooling, found.normalize, found.dense) == (pooling, False, ())
    assert found.width(8) == 8 * len(pooling)


def test_dense_layers_normalization_and_prompts_are_read(write: Callable[..., Path]) -> None:
    folder = write(
        *("Transformer", "Pooling", "Dense", "Normalize"),
        config_sentence_transformers={"prompts": {"query": "find: ", "text": None}, "default_prompt_name": "query"},
        sentence_bert_config={"do_lower_case": True},
    )
    found = sentence_modules.read(folder)
    assert [layer.activation for layer in found.dense] == ["Tanh"] and found.width(8) == 3
    assert found.normalize is True and found.lower_case
    assert (found.prompts, found.default_prompt) == ({"query": "find: ", "text": ""}, "query")
    found.check(8)
    with pytest.raises(InvalidInputError, match=r"in_features: got 8; 16 in .*2_Dense"):
        found.check(16)


@pytest.mark.parametrize(
    ("pooling", "normalize", "message"),
    [
        ("mean", "auto", "pooling: got 'mean'; cls, as the modules of the checkpoint say; remove `pooling`"),
        ("auto", "false", "normalize: got 'false'; true, as the modules"),
    ],
)
def test_a_parameter_that_contradicts_the_folder_is_refused(
    write: Callable[..., Path], pooling: str, normalize: str, message: str
) -> None:
    found = sentence_modules.read(write("Transformer", "Pooling", "Normalize"))
    assert found.resolved("cls", "true", "mean") == found.resolved("auto", "auto", "mean")
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        found.resolved(pooling, normalize, "mean")
    # A head of one's own states what it was trained on.
    assert found.for_head().resolved("mean", "false", "cls").pooling == ("mean",)


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("Transformer", "Pooling", "Pooling"), {}, "got '2 poolings'; one Pooling"),
    (("Transformer", "Pooling", "custom.Dense"), {}, "module custom.Dense is not served"),
    (("Transformer", "Normalize", "Pooling"), {}, "the modules are Transformer, Normalize, Pooling; served is"),
    (("Transformer", "Normalize"), {}, "no Pooling"),
    ((), {}, "served is the order"),
    (("Transformer", "Pooling"), {"pooling": {"pooling_mode": "median"}}, "pooling_mode: got 'median'; one of cls"),
    (("Transformer", "Pooling"), {"pooling": {"pooling_mode_first": True}}, "pooling_mode_first in .* is not served"),
    (
        ("Transformer", "Pooling"),
        {
            "pooling": {"pooling_mode": "mean", "include_prompt": False},
            "config_sentence_transformers": {"prompts": {"query": "find: "}},
        },
        "include_prompt: false .* do not leave out those of a prompt",
    ),
    (
        ("Transformer", "Pooling"),
        {"config_sentence_transformers": {"prompts": {"a": "b"}, "default_prompt_name": "query"}},
        "default_prompt_name: got 'query'; one of the prompts in .*: a",
    ),
    (
        ("Transformer", "Pooling", "Dense"),
        {"dense": {**DENSE, "activation_function": "os.system"}},
        "activation_function: got 'os.system'; one of torch.nn's Tanh",
    ),
    (("Transformer", "Pooling", "Dense"), {"dense": {**DENSE, "use_residual": True}}, "use_residual"),
]


@pytest.mark.parametrize(("kinds", "given", "message"), REFUSED)
def test_what_engines_do_not_compute_is_refused(
    write: Callable[..., Path], kinds: tuple[str, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeshiftError, match=message):
        sentence_modules.read(write(*kinds, **given))


def test_include_prompt_without_prompts_changes_nothing(write: Callable[..., Path]) -> None:
    folder = write("Transformer", "Pooling", pooling={"pooling_mode": "mean", "include_prompt": False})
    assert sentence_modules.read(folder).pooling == ("mean",)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"])
def test_a_file_that_was_not_downloaded_is_named(write: Callable[..., Path], name: str) -> None:
    folder = write("Transformer", "Pooling", "Dense")
    (folder / name).unlink()
    with pytest.raises(InvalidInputError, match=f"checkpoint: .*must hold {name}"):
        sentence_modules.read(folder)


def test_modules_that_are_no_json(write: Callable[..., Path]) -> None:
    folder = write("Transformer", "Pooling")
    (folder / "modules.json").write_text("[1]")
    with pytest.raises(InvalidInputError, match="a list of modules, each with type and path"):
        sentence_modules.read(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(InvalidInputError, match="not JSON"):
        sentence_modules.read(folder)
