"""DESCRIPTION: what a front is, in JSON, for a client that knows nothing but the model's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift import __version__
from shapeshift.serving.model_args import DESCRIPTION, ModelArgs
from shapeshift.serving.pb_utils import InferenceRequest

EMBEDDING, RERANKING, GENERATION = "embedding", "reranking", "generation"
TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION = "text_classification", "token_classification"
IMAGE_CLASSIFICATION, IMAGE_EMBEDDING = "image_classification", "image_embedding"
SPARSE_EMBEDDING, TOKEN_EMBEDDING = "sparse_embedding", "token_embedding"
IDENTITY, SIGMOID, SOFTMAX = "identity", "sigmoid", "softmax"
TOOL_PARSERS = (
    *("openai", "muse_glimmer", "gemma4", "seed_oss", "qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "kimi_k3"),
    *("functionary_v3_2", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v3", "kimi_k2", "cohere_command3", "mistral", "lfm2", "nemotron", "minimax", "granite", "gigachat3"),
    *("gigachat3_roles", "apertus", "solar_open", "hy_v3", "minicpm5", "hermes", "functionary", "llama3_json"),
)
"""Forms in which models write calls of tools, see `gateway.answers.families`; vLLM's names where it has the form."""
_NOTHING = np.array([[b""]], dtype=object)
# Inputs of a request for DESCRIPTION, tried in turn: without any, Triton takes it only for a model without batches.
PLACEHOLDERS: Sequence[Mapping[str, NDArray[np.object_]]] = ({}, {"TEXT": _NOTHING}, {"IMAGE": _NOTHING})


@dataclass(frozen=True)
class Description:
    """What a front says of itself; None: does not apply, and is left out.

    kind               one of the words above; reranking: of pairs of texts, with one score each
    also               further kinds that it serves as
    max_tokens         of the longest text; of a model that generates: prompt and answer together
    embedding_size     numbers in an EMBEDDING
    dimensions         fewer numbers to which a vector may be cut; "any": whatever is below
    pooling            what makes one vector of those of the tokens
    labels             names of the classes, in the order of their values; of images: those of the default task
    activation         what makes scores of LOGITS: identity, sigmoid or softmax
    pairs              whether rows may be pairs of texts; only_pairs: whether they must be
    prompts            texts that the parameter prompt_name chooses from, by name
    default_prompt     the name of the one for requests that name none
    text_model         of images: the front whose vectors of texts lie in the same space
    similarity         of images: the scale and the bias of the logits that are made of cosines to texts
    adapters           values of the parameter lora_name
    tasks              of images: values of the parameter task; of a cascade: the one that it serves
    levels             the models of a cascade
    chat_template      Jinja source; tool_use_template: of conversations with tools, where there is another one
    special_tokens     texts that these templates may use, by name
    tool_parser        form in which the model writes calls of tools, one of `TOOL_PARSERS`
    checkpoint_version  the beginning of the hash of its checkpoint
    engines            the beginning of the hash of its engines' manifest; of a cascade: those of its first level
    registry           version of its adapters, tasks or candidates: two fronts that serve the same ones have the same
    load               in a fleet: requests that wait or run
    unread_tokens      in a fleet: prompt tokens of the requests that have no first token yet
    unary, stream      models that answer a request for text with one response, and with a stream
    """

    kind: str
    also: Sequence[str] | None = None
    checkpoint: str | None = None
    precision: str | None = None
    max_tokens: int | None = None
    embedding_size: int | None = None
    dimensions: Sequence[int] | str | None = None
    pooling: str | None = None
    labels: Sequence[str] | None = None
    activation: str | None = None
    pairs: bool | None = None
    only_pairs: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    text_model: str | None = None
    similarity: Sequence[float | None] | None = None
    adapters: Sequence[str] | None = None
    tasks: Sequence[str] | None = None
    levels: Sequence[str] | None = None
    chat_template: str | None = None
    tool_use_template: str | None = None
    special_tokens: Mapping[str, str] | None = None
    tool_parser: str | None = None
    checkpoint_version: str | None = None
    engines: str | None = None
    registry: str | None = None
    load: float | None = None
    unread_tokens: float | None = None
    unary: str | None = None
    stream: str | None = None

    def as_json(self, args: ModelArgs) -> str:
        """A JSON object of the facts that apply, with what it is called, and the version of Shapeshift."""
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        identity = {
            "model": args.name,
            "version": args.version,
            "outputs": args.outputs,
            "max_batch_size": args.max_batch_size,
            "shapeshift": __version__,
        }
        return json.dumps({**facts, **identity}, ensure_ascii=False)


_VERSION_DIGITS = 12


def checkpoint_version(parameters: Mapping[str, str]) -> str | None:
    """The `checkpoint_version` of a front, from the generated config.pbtxt; None without a hash there."""
    return parameters.get("checkpoint_sha256", "")[:_VERSION_DIGITS] or None


def engines_version(manifest_sha256: str) -> str | None:
    """The `engines` of a front whose engines' manifest has this hash; None without one."""
    return manifest_sha256[:_VERSION_DIGITS] or None


def registry_version(entries: Mapping[str, str]) -> str:
    """The `registry` of a front that serves these entries: by name, the hash of an entry, or all of it."""
    listed = json.dumps(dict(sorted(entries.items())))
    return hashlib.sha256(listed.encode()).hexdigest()[:_VERSION_DIGITS]


def is_wanted(request: InferenceRequest) -> bool:
    """Whether `request` asks for DESCRIPTION: for no other output, or, without any input, among others."""
    outputs = request.requested_output_names()
    return DESCRIPTION.name in outputs and (len(outputs) == 1 or not request.inputs())


def checkpoint_name(parameters: Mapping[str, str]) -> str | None:
    """The checkpoint as the user wrote it, from the parameters in the generated config.pbtxt."""
    return parameters.get("checkpoint_name") or parameters.get("checkpoint") or None


def told(outputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """What a front says of itself, from its answer to a request for DESCRIPTION.

    Raises KeyError where the answer lacks it, ValueError where it is not one text of JSON.
    """
    facts: dict[str, Any] = json.loads(outputs[DESCRIPTION.name].item())
    return facts


def forwarded(description: bytes, unary: str) -> bytes:
    """The description of a model that generates, as the model `unary`, which forwards to it, gives it."""
    return json.dumps({**json.loads(description), "model": unary, "unary": unary}, ensure_ascii=False).encode()
