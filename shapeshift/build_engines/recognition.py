"""What the files of a checkpoint say of it: the technique that serves it, and the tensors of its front model.

Classes of transformers say what a checkpoint is for; which families are served decides the technique's own package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.build_engines import decode
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.text import front as text_front
from shapeshift.engines.text import chat_template_files, classifiers, sentence_modules
from shapeshift.engines.text import families as text_families
from shapeshift.engines.text.sentence_modules import MODULES_FILE
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.fused_decode.model import architecture
from shapeshift.polymorph.settings import ENTITIES, SPARSE_OUTPUTS
from shapeshift.serving.text_inputs import OFFSETS, TEXT_PAIR

TECHNIQUES = (text_front.BACKEND, decode.BACKEND, decode.WITH_ADAPTERS, image_front.BACKEND)
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
# The ends of the names of transformers' classes.
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFIES, _LABELS_TOKENS, _CLASSIFIES_IMAGES = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
)
# Keys of config.json that only vision models have; the first is timm's name of the model.
_VISION_KEYS = ("architecture", "image_size", "vision_config")


@dataclass(frozen=True)
class Recognised:
    """How a checkpoint is served.

    technique  one of TECHNIQUES
    because    the file and the field that say so
    config     content of the config.json of the model itself
    pairs      whether its rows are pairs of texts
    chats      whether it has a chat template
    adapters   whether a text model takes adapters
    texts      whether it has a tower for texts beside that for images
    inputs, outputs  tensors that config.pbtxt lists; empty: those of the technique
    """

    technique: str
    because: str
    config: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    pairs: bool = False
    chats: bool = False
    adapters: bool = False
    texts: bool = False


def recognise(folder: Path, technique: str = "") -> Recognised:
    """How the checkpoint in `folder` is served. technique: the user's choice; empty: as its files say.

    Raises InvalidInputError for a folder that holds no model, UnsupportedError for one of an unknown kind.
    """
    modules = sentence_modules.read(folder)
    config = _read_config(folder / modules.transformer)
    classes = [str(name) for name in config.get("architectures") or ()]
    chosen, because = _technique(config, classes, bool(modules.pooling or modules.terms or modules.answers))
    if technique == decode.WITH_ADAPTERS and chosen == text_front.BACKEND:
        return replace(recognise(folder), adapters=True)
    if technique and technique != chosen:
        chosen, because = technique, "--technique"
    if chosen in (decode.BACKEND, decode.WITH_ADAPTERS):
        return Recognised(chosen, because, config, chats=chat_template_files.read(folder).text is not None)
    if chosen == image_front.BACKEND:
        return Recognised(chosen, because, config, texts=text_families.has_text_tower(config))
    config = text_families.text_config(config)
    if modules.answers:
        return Recognised(chosen, because, config, (TEXT_PAIR,), ("LOGITS",), True)
    if modules.terms:
        return Recognised(chosen, because, config, (), SPARSE_OUTPUTS)
    if modules.pooling:
        further = [*(SPARSE_OUTPUTS if modules.token_weights else ())]
        further += ["TOKEN_EMBEDDING"] if modules.token_dense else []
        return Recognised(chosen, because, config, (), ("EMBEDDING", *further) if further else ())
    if _ends(classes, _CLASSIFIES):
        # A request may have one text or a pair: which of both a classifier was trained on no file says.
        pairs = classifiers.is_cross_encoder(config, modules)
        return Recognised(chosen, because, config, (TEXT_PAIR,), ("LOGITS",), pairs)
    if _ends(classes, _LABELS_TOKENS):
        return Recognised(chosen, because, config, (), ("TOKEN_LOGITS", OFFSETS, ENTITIES))
    return Recognised(chosen, because, config)


def _technique(config: Mapping[str, Any], classes: list[str], embeds: bool) -> tuple[str, str]:
    named = f"{_CONFIG}: architectures {', '.join(classes) or 'none'}"
    if embeds:
        return text_front.BACKEND, f"{MODULES_FILE}: a model of sentence-transformers"
    vision = [key for key in _VISION_KEYS if key in config]
    if _ends(classes, _CLASSIFIES_IMAGES) or (vision and not _ends(classes, *_GENERATES)):
        return image_front.BACKEND, f"{_CONFIG}: {vision[0]}" if vision else named
    if _ends(classes, *_GENERATES) and not config.get("is_encoder_decoder"):
        return decode.BACKEND, named
    if not classes and _generates(config):
        return decode.BACKEND, f"{named}, model_type {config['model_type']}"
    return text_front.BACKEND, f"{named}, model_type {config.get('model_type')}"


def _generates(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint that names no class of transformers is a decoder, by its model_type."""
    model_type = str(config.get("model_type"))
    return model_type in architecture.FAMILIES or (
        model_type not in text_families.FAMILIES and text_families.generates(model_type)
    )


def _ends(classes: list[str], *ends: str) -> bool:
    return any(name.endswith(ends) for name in classes)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file() and (folder / _ADAPTER).is_file():
        raise UnsupportedError(
            f"checkpoint: {folder} holds an adapter ({_ADAPTER}), which is served over its base model: add that one "
            "with --technique adapter_cache, then use `shapeshift adapters add`"
        )
    if not file.is_file():
        raise InvalidInputError("checkpoint", str(folder), f"must hold {_CONFIG}, as transformers and timm write it")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError("checkpoint", str(file), f"JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise InvalidInputError("checkpoint", str(file), "a JSON object; download it again")
    return config
