"""The modules of a sentence-transformers folder: what turns a model's token vectors into one vector for each text.

The folder has modules.json, which lists them in order, and a sub-folder with a config.json for each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shapeshift.engines import weight_headers
from shapeshift.engines.settings import POOLINGS
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.settings import require

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
# Classes of torch.nn.
ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "Mish")
_DENSE_WEIGHTS = "model.safetensors"
_PACKAGE = "sentence_transformers."
_KINDS = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize", "SpladePooling", "LogitScore")
# The names of version 5 and earlier.
_OLD_KINDS = {"MLMTransformer": "Transformer"}
TERM_POOLINGS, TERM_ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")
# Of BGE-M3, as `shapeshift convert` writes them.
TOKEN_HEADS = TOKEN_DENSE, TOKEN_WEIGHTS = "colbert_linear.safetensors", "sparse_linear.safetensors"
# The names of version 5 and earlier, where several flags may be true.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer with an activation (one of ACTIVATIONS) over the pooled vector. `file`: its weights."""

    file: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class TowerLayer(DenseLayer):
    """The projection of a tower for texts. module: its name in `file`, which holds the whole checkpoint."""

    module: str


@dataclass(frozen=True)
class SentenceModules:
    """What follows the transformer, in this order; and what precedes it.

    pooling     names in POOLINGS; the vectors of several are joined. Empty: the folder does not say
    dense       linear layers over the pooled vector
    normalize   whether the result is scaled to length 1; None: the folder does not say
    prompts     texts that a client may have put before its own, by name
    default_prompt  the name of the prompt for requests that name none; empty: no prompt
    lower_case  whether texts become lower case before the tokenizer reads them
    token_dense   of BGE-M3, over the vector of a token, which then has length 1; the first token of a text has none
    token_weights of BGE-M3, one number for each token, none below zero; special tokens have 0
    terms       of a SparseEncoder, how its weights of the vocabulary are pooled: of TERM_POOLINGS, and of
                TERM_ACTIVATIONS; empty: the folder does not say
    answers     of a CrossEncoder over a decoder: the ids of the tokens for yes and, if it has one, no
    cross_encoder  whether the folder is a CrossEncoder
    activation  the class of torch.nn that makes scores of a CrossEncoder's logits; empty: not stated
    transformer sub-folder with the model; empty: the folder itself
    """

    pooling: tuple[str, ...] = ()
    normalize: bool | None = None
    dense: tuple[DenseLayer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lower_case: bool = False
    token_dense: DenseLayer | None = None
    token_weights: DenseLayer | None = None
    terms: tuple[str, ...] = ()
    answers: tuple[int, ...] = ()
    cross_encoder: bool = False
    activation: str = ""
    transformer: str = ""

    @property
    def sparse_output(self) -> str:
        """The output of engines that sparse vectors are made of."""
        return "TOKEN_WEIGHTS" if self.token_weights else "TERM_WEIGHTS"

    @property
    def files(self) -> list[Path]:
        """The weights beside those of the transformer."""
        layers = [*self.dense, *filter(None, (self.token_dense, self.token_weights))]
        return [layer.file for layer in layers if not isinstance(layer, TowerLayer)]

    def token_width(self, hidden: int) -> int:
        """The width of TOKEN_EMBEDDING."""
        return self.token_dense.out_features if self.token_dense else hidden

    def width(self, hidden: int) -> int:
        """The width of EMBEDDING for token vectors of width `hidden`."""
        return self.dense[-1].out_features if self.dense else hidden * max(1, len(self.pooling))

    def resolved(self, pooling: str, normalize: str, default_pooling: str) -> SentenceModules:
        """These modules with the parameters `pooling` and `normalize` of config.pbtxt, where "auto" follows the folder.

        Raises InvalidInputError where a parameter contradicts the folder.
        """
        poolings = () if pooling == "auto" else tuple(pooling.split(","))
        if self.pooling and poolings and poolings != self.pooling:
            _conflict("pooling", pooling, ",".join(self.pooling))
        scaled = None if normalize == "auto" else normalize == "true"
        if self.normalize is not None and scaled is not None and scaled != self.normalize:
            _conflict("normalize", normalize, str(self.normalize).lower())
        normalized = self.normalize if scaled is None else scaled
        return replace(
            self,
            pooling=self.pooling or poolings or (default_pooling,),
            normalize=True if normalized is None else normalized,
        )

    def for_head(self) -> SentenceModules:
        """Without pooling, dense layers, normalization and activation: a head of one's own states what it was trained
        on."""
        return replace(
            self,
            pooling=(),
            dense=(),
            normalize=None,
            token_dense=None,
            token_weights=None,
            cross_encoder=False,
            activation="",
        )

    def with_projection(self, folder: Path, module: str) -> SentenceModules:
        """With the linear layer of this name in the checkpoint in `folder`, if it has one and no dense layers."""
        headers = weight_headers.read(folder) if module and not self.dense else {}
        if f"{module}.weight" not in headers:
            return self
        weight = headers[f"{module}.weight"]
        outputs, inputs = weight.shape
        layer = TowerLayer(weight.file, inputs, outputs, f"{module}.bias" in headers, "Identity", module)
        return replace(self, dense=(layer,))

    def check(self, hidden: int) -> None:
        """Raise InvalidInputError unless the dense layers fit token vectors of width `hidden`."""
        width = hidden * len(self.pooling)
        for layer in self.dense:
            require(layer.in_features == width, "in_features", layer.in_features, f"{width} in {layer.file.parent}")
            width = layer.out_features
        for layer in filter(None, (self.token_dense, self.token_weights)):
            require(layer.in_features == hidden, "in_features", layer.in_features, f"{hidden} in {layer.file}")


def read(folder: Path) -> SentenceModules:
    """The modules of `folder`; those of a folder without modules.json say nothing.

    Raises InvalidInputError for a missing or invalid file or a second pooling, UnsupportedError for a module, an
    order or a setting that engines do not compute.
    """
    file = folder / MODULES_FILE
    if not file.is_file():
        return _with_token_heads(SentenceModules(), folder)
    listed = _json(file)
    try:
        modules = [(_kind(str(entry["type"]), file), str(entry["path"])) for entry in listed]
    except (TypeError, KeyError):
        raise InvalidInputError(MODULES_FILE, str(file), "a list of modules, each with type and path") from None
    kinds = [kind for kind, _ in modules]
    _check_order(kinds, file)
    config = _config(folder)
    pooling: tuple[str, ...] = ()
    for kind, path in modules:
        if kind == "Pooling":
            pooling = _pooling(folder / path, config.prompts)
    return replace(
        _with_token_heads(config, folder),
        pooling=pooling,
        terms=next((_terms(folder / path) for kind, path in modules if kind == "SpladePooling"), ()),
        answers=next((_answers(folder / path) for kind, path in modules if kind == "LogitScore"), ()),
        dense=tuple(_dense(folder / path) for kind, path in modules if kind == "Dense"),
        normalize="Normalize" in kinds if pooling else None,
        lower_case=_lower_case(folder / modules[0][1]),
        transformer=modules[0][1],
    )


def _kind(name: str, file: Path) -> str:
    kind = _OLD_KINDS.get(name.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1])
    if not name.startswith(_PACKAGE) or kind not in _KINDS:
        raise UnsupportedError(f"{file}: module {name} is not served; served are {', '.join(_KINDS)}")
    return kind


def _check_order(kinds: Sequence[str], file: Path) -> None:
    if kinds.count("Pooling") > 1:
        raise InvalidInputError(MODULES_FILE, f"{kinds.count('Pooling')} poolings", f"one Pooling in {file}")
    if kinds in (["Transformer", "SpladePooling"], ["Transformer", "LogitScore"]):
        return
    order = ["Transformer", "Pooling", "Dense", "Normalize"]
    ranks = [order.index(kind) if kind in order else -1 for kind in kinds if kind != "Dropout"]
    once = all(kinds.count(kind) <= 1 for kind in ("Transformer", "Normalize"))
    if not kinds or kinds[0] != "Transformer" or ranks != sorted(ranks) or not once:
        raise UnsupportedError(f"{file}: the modules are {', '.join(kinds)}; served is the order {', '.join(order)}")
    if len(ranks) > 1 and "Pooling" not in kinds:
        raise UnsupportedError(f"{file}: {', '.join(kinds)} have no Pooling, so there is no vector for a text")


def _pooling(folder: Path, prompts: Mapping[str, str]) -> tuple[str, ...]:
    config = _json(folder / "config.json")
    where = f"in {folder / 'config.json'}"
    modes = config.get("pooling_mode")
    if modes is None:
        flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        unknown = [name for name in flags if name not in _POOLING_FLAGS]
        if unknown:
            raise UnsupportedError(f"{unknown[0]} {where} is not served; served are {', '.join(_POOLING_FLAGS)}")
        # The vectors of several are joined in this order, whatever the order in the file.
        modes = [mode for name, mode in _POOLING_FLAGS.items() if name in flags] or ["mean"]
    pooling = (modes,) if isinstance(modes, str) else tuple(modes)
    for mode in pooling:
        require(mode in POOLINGS, "pooling_mode", mode, f"one of {', '.join(POOLINGS)} {where}")
    if config.get("include_prompt") is False and any(prompts.values()):
        raise UnsupportedError(
            f"include_prompt: false {where}, and {PROMPTS_FILE} has prompts: engines pool all tokens of a text and do "
            "not leave out those of a prompt; remove the prompts and let clients send whole texts only if that is meant"
        )
    return pooling


def _terms(folder: Path) -> tuple[str, str]:
    """The pooling and the activation of a SpladePooling."""
    config = _json(folder / "config.json")
    pooling, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for name, value, allowed in (
        ("pooling_strategy", pooling, TERM_POOLINGS),
        ("activation_function", activation, TERM_ACTIVATIONS),
    ):
        require(value in allowed, name, value, f"one of {', '.join(allowed)} in {folder / 'config.json'}")
    return pooling, activation


def _answers(folder: Path) -> tuple[int, ...]:
    """The tokens of a LogitScore."""
    config = _json(folder / "config.json")
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    valid = isinstance(ids[0], int) and isinstance(ids[1], int | None)
    require(valid, "true_token_id, false_token_id", ids, f"ids of tokens in {folder / 'config.json'}")
    return tuple(one for one in ids if one is not None)


def _with_token_heads(modules: SentenceModules, folder: Path) -> SentenceModules:
    return replace(
        modules,
        token_dense=_linear(folder / TOKEN_DENSE, "Identity"),
        token_weights=_linear(folder / TOKEN_WEIGHTS, "ReLU", outputs=1),
    )


def _linear(file: Path, activation: str, outputs: int | None = None) -> DenseLayer | None:
    """The layer in a file with its `weight` [outputs, inputs] and `bias`; None where there is no such file."""
    if not file.is_file():
        return None
    shapes = {name: list(tensor.shape) for name, tensor in weight_headers.read_file(file).items()}
    weight = shapes.get("weight", [])
    if len(weight) != 2 or outputs not in (None, weight[0]) or shapes != {"weight": weight, "bias": weight[:1]}:
        raise InvalidInputError(
            file.name, shapes, f"weight [{outputs or 'outputs'}, inputs] and its bias, in {file.parent}"
        )
    return DenseLayer(file, weight[1], weight[0], True, activation)


def _dense(folder: Path) -> DenseLayer:
    config, weights = _json(folder / "config.json"), folder / _DENSE_WEIGHTS
    where = f"in {folder / 'config.json'}"
    if not weights.is_file():
        raise InvalidInputError(
            "checkpoint",
            str(folder),
            f"must hold {folder.name}/{_DENSE_WEIGHTS} (`shapeshift convert {folder.parent}` makes it)",
        )
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise UnsupportedError(
            f"use_residual, module_input_name {where}: only a layer over the pooled vector is served"
        )
    module, _, activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if not module.startswith("torch.nn") or activation not in ACTIVATIONS:
        allowed = f"one of torch.nn's {', '.join(ACTIVATIONS)} {where}"
        raise InvalidInputError("activation_function", config["activation_function"], allowed)
    try:
        sizes = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError("in_features, out_features", config, f"whole numbers {where}") from None
    return DenseLayer(weights, *sizes, bool(config.get("bias", True)), activation)


def _config(folder: Path) -> SentenceModules:
    """Only what PROMPTS_FILE says of a folder."""
    file = folder / PROMPTS_FILE
    config = _json(file) if file.is_file() else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise InvalidInputError("prompts", prompts, f"texts by name in {file}")
    if default and default not in prompts:
        raise InvalidInputError("default_prompt_name", default, f"one of the prompts in {file}: {', '.join(prompts)}")
    return SentenceModules(
        prompts={name: text or "" for name, text in prompts.items()},
        default_prompt=default,
        cross_encoder=config.get("model_type") == "CrossEncoder",
        activation=str(config.get("activation_fn") or ""),
    )


def _lower_case(folder: Path) -> bool:
    return any(_json(file).get("do_lower_case") for file in sorted(folder.glob("sentence_*_config.json")))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInputError(
            "checkpoint", str(file.parent), f"must hold {file.parent.name}/{file.name}; download it again"
        ) from None
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(file), f"not JSON: {error}") from None


def _conflict(name: str, value: str, of_modules: str) -> None:
    raise InvalidInputError(
        name,
        value,
        f"{of_modules}, as the modules of the checkpoint say; remove `{name}` from config.pbtxt, or set {of_modules}",
    )
