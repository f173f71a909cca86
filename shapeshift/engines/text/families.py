"""Model families: how the text models of transformers take a pack of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`.

    name            as their authors write it
    first_position  position of a row's first token; None: the padding id plus one, in these families 1 by default
    causal          whether a token attends only to itself and earlier tokens
    bidirectional   whether config.json must say that a token of this kind of decoder attends to later ones, too
    packs_rows      whether several rows may share a sequence; False: the model has no exact mask for it
    classifies      whether LOGITS and TOKEN_LOGITS are served
    biases_attention  whether a bias of each layer is added to the scores of attention
    library         class of transformers that loads it
    projection      of a tower for texts (CLIP, SigLIP), the linear layer over its pooled vector, in its checkpoint
    defaults        what its config.json leaves out
    pads            whether every text is padded to the longest that the model reads, and the padding is read
    """

    name: str
    first_position: int | None = 0
    causal: bool = False
    bidirectional: bool = False
    packs_rows: bool = True
    classifies: bool = True
    biases_attention: bool = False
    library: str = "AutoModel"
    projection: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pads: bool = False

    @property
    def counts_itself(self) -> bool:
        """Whether a window of local attention counts the token itself, as those of decoders do."""
        return self.causal or self.bidirectional

    @property
    def pooling(self) -> str:
        """The pooling of a checkpoint that states none: only the last token of a causal model attends to all others."""
        return "lasttoken" if self.causal or self.pads else "mean"


# Relative positions stay exact in a pack: the tokens of a row lie side by side.
FAMILIES: dict[str, Family] = {
    "bert": Family("BERT"),
    "roberta": Family("RoBERTa", first_position=None),
    "xlm-roberta": Family("XLM-R", first_position=None),
    "camembert": Family("CamemBERT", first_position=None),
    "distilbert": Family("DistilBERT"),
    # Its padding index is 1 whatever the configuration says.
    "mpnet": Family("MPNet", first_position=2, biases_attention=True),
    "albert": Family("ALBERT"),
    "electra": Family("ELECTRA"),
    "modernbert": Family("ModernBERT"),
    "eurobert": Family("EuroBERT"),
    "jina_embeddings_v3": Family("Jina embeddings v3"),
    "gte": Family("GTE"),
    # Files of its authors name these in other words, and transformers takes its own defaults.
    "nomic_bert": Family(
        "Nomic BERT", defaults={"hidden_size": 768, "vocab_size": 30528, "max_position_embeddings": 2048}
    ),
    # It multiplies its embeddings by the mask, which must then have one value per token.
    "deberta-v2": Family("DeBERTa v2 and v3", packs_rows=False),
    "qwen2": Family("Qwen2", causal=True),
    "qwen3": Family("Qwen3", causal=True),
    "llama": Family("Llama", causal=True),
    "gemma3_text": Family("EmbeddingGemma", bidirectional=True, classifies=False),
    # These two refuse more tokens than they have positions, of how many texts whatever.
    "clip_text_model": Family(
        "CLIP (texts)",
        causal=True,
        packs_rows=False,
        classifies=False,
        library="CLIPTextModel",
        projection="text_projection",
        defaults={"hidden_size": 512, "vocab_size": 49408, "max_position_embeddings": 77},
    ),
    "siglip_text_model": Family(
        "SigLIP (texts)",
        packs_rows=False,
        classifies=False,
        library="SiglipTextModel",
        projection="text_model.head",
        defaults={"hidden_size": 768, "vocab_size": 32000, "max_position_embeddings": 64},
        pads=True,
    ),
}
# Encoders of other families whose positions begin behind the padding id.
_FROM_PADDING = (
    *("data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"),
)


def has_text_tower(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model of images and texts in one space."""
    return f"{config.get('model_type')}_text_model" in FAMILIES and isinstance(config.get("text_config"), dict)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json; of a model of images and texts what it says of its tower for texts."""
    if has_text_tower(config):
        config = {**config["text_config"], "model_type": f"{config['model_type']}_text_model"}
    family = FAMILIES.get(str(config.get("model_type")))
    return {**(family.defaults if family else {}), **config}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's config.json. An encoder of another family computes one row at a time.

    Raises InvalidInputError without a model_type, UnsupportedError for decoders of other families and for what
    transformers lacks.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInputError("model_type", model_type, "in config.json, as transformers writes it")
    family = FAMILIES.get(model_type)
    if family is not None and (config.get("use_bidirectional_attention") or not family.bidirectional):
        # transformers lets a decoder whose config.json says so attend to later tokens.
        sees_all = family.causal and config.get("is_causal") is False
        return replace(family, causal=False, bidirectional=True) if sees_all else family
    if has_class(config, "ForCausalLM") or config.get("is_encoder_decoder") or generates(model_type):
        kind = "an encoder with a decoder" if config.get("is_encoder_decoder") else "a decoder"
        raise UnsupportedError(
            f"checkpoint: model_type {model_type} is {kind} that polymorph does not serve; "
            f"it serves {', '.join(FAMILIES)} and other encoders"
        )
    if not is_of_library(model_type):
        raise UnsupportedError(
            f"checkpoint: model_type {model_type} is not one that transformers has; code of the checkpoint's own is "
            "never run"
        )
    first = None if model_type in _FROM_PADDING else 0
    return Family(model_type, first, packs_rows=False, classifies=False)


def has_class(config: Mapping[str, Any], end: str) -> bool:
    """Whether config.json names a class of transformers that ends so, such as ForMaskedLM."""
    return any(str(name).endswith(end) for name in config.get("architectures") or ())


def generates(model_type: str) -> bool:
    """Whether transformers knows models of this type as decoders. It is slow to import."""
    from transformers.models.auto import modeling_auto

    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in encoders


def is_of_library(model_type: str) -> bool:
    """Whether transformers has models of this type."""
    from transformers.models.auto import configuration_auto

    return model_type in configuration_auto.CONFIG_MAPPING


def hidden_size(config: Mapping[str, Any]) -> int:
    """The width of the token vectors of a checkpoint's config.json. Raises InvalidInputError if it is not stated."""
    # DistilBERT calls it dim.
    value = config.get("hidden_size", config.get("dim"))
    if not isinstance(value, int):
        raise InvalidInputError("hidden_size", value, "a whole number in config.json")
    return value


def stated_dimensions(config: Mapping[str, Any]) -> str:
    """The widths to which vectors may be cut, with commas, or any, in vLLM's words; empty: none is stated."""
    widths = config.get("matryoshka_dimensions")
    if isinstance(widths, list) and all(isinstance(width, int) and width > 0 for width in widths):
        return ",".join(map(str, widths))
    return "any" if config.get("is_matryoshka") else ""


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """The number of ids that the model embeds. Raises InvalidInputError if config.json does not state it."""
    value = config.get("vocab_size")
    if not isinstance(value, int):
        raise InvalidInputError("vocab_size", value, "a whole number in config.json")
    return value


def longest_text(config: Mapping[str, Any]) -> int:
    """The tokens of the longest text that the model has positions for; config: with every key, or as config.json.

    Raises UnsupportedError if the configuration does not limit positions.
    """
    family = family_of(config)
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or not positions:
        raise UnsupportedError(f"checkpoint: model_type {family.name} has no max_position_embeddings in config.json")
    return positions - first_position(family, config.get("pad_token_id"))


def first_position(family: Family, padding: int | None) -> int:
    """The position of a row's first token in a model of this family with this padding id."""
    if family.first_position is not None:
        return family.first_position
    return (1 if padding is None else padding) + 1
