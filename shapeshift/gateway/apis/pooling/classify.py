"""The classes of texts, of pairs of them, or of images in data URLs: POST /v1/classify of vLLM, /predict of TEI."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import orjson
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.errors import ModelError
from shapeshift.gateway.apis.fields import (
    ROWS,
    ApiRequest,
    Int32,
    Item,
    ModelRequest,
    Rows,
    RowsOrItems,
    TeiRequest,
    bounded,
    not_served,
)
from shapeshift.gateway.apis.pooling.images import image_file, zero_shot
from shapeshift.gateway.apis.pooling.vectors import softmax
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.text_rows import infer_rows, infer_texts, renumbered, require_output, text_column
from shapeshift.serving.description import (
    IDENTITY,
    IMAGE_CLASSIFICATION,
    IMAGE_EMBEDDING,
    SIGMOID,
    SOFTMAX,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
)
from shapeshift.triton.async_client import Tensors

router = APIRouter(route_class=BodyRoute, tags=["classify"])

Strategy = Literal["none", "simple", "first", "average", "max"]
_MOST_ROWS = 2048
# What stands beside the label where a front has it, in lower case.
_FURTHER = ("CONFIDENCE", "LEVEL", "GAMMA", "OUTCOME")


class ClassifyRequest(ModelRequest):
    """input: texts, beside vLLM's pairs of them, or for an image model data URLs, also in Jina's objects.

    labels: Jina's, for a model of images and texts. task, level and min_accuracy are request parameters of models.
    """

    # A front calls the pixels of a decoded IMAGE `image`.
    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("TEXT", "TEXT_PAIR", "IMAGE", "image"), "input")

    input: RowsOrItems = Field(description=ROWS)
    labels: Annotated[list[str], bounded(1, _MOST_ROWS)] | None = None
    truncate: bool | None = None
    task: str | None = None
    level: Annotated[Int32, Field(ge=1)] | None = None
    min_accuracy: float | None = None

    def rows(self) -> list[list[str]]:
        """Rows of one text or two."""
        rows = [self.input] if isinstance(self.input, str) else self.input
        plain = [(row.text or row.image or "") if isinstance(row, Item) else row for row in rows]
        return [[row] if isinstance(row, str) else row for row in plain]


class EntityParameters(ApiRequest):
    """Where huggingface_hub's client has it. ignore_labels: by default O.

    candidate_labels: of an image, each put into hypothesis_template, as transformers' pipeline does.
    """

    aggregation_strategy: Strategy | None = None
    ignore_labels: Annotated[list[str] | None, not_served(["O"])] = None
    stride: Annotated[int | None, not_served(0)] = None
    candidate_labels: Annotated[list[str], bounded(1, _MOST_ROWS)] | None = None
    hypothesis_template: str = "This is a photo of {}."


class PredictRequest(TeiRequest):
    """TEI's; with the aggregation_strategy of transformers' pipeline for a model that classifies tokens."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "TEXT", "TEXT_PAIR"), "inputs")

    inputs: Rows = Field(description="a text, a pair of texts, or a list of lists with one text or one pair each")
    raw_scores: bool = False
    aggregation_strategy: Strategy | None = None
    parameters: EntityParameters | None = None

    @property
    def strategy(self) -> str | None:
        """How tokens become entities."""
        nested = None if self.parameters is None else self.parameters.aggregation_strategy
        return self.aggregation_strategy or nested

    def texts(self) -> list[str]:
        """The texts, for a model that reads no pairs."""
        rows = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [text for row in rows for text in ([row] if isinstance(row, str) else row)]

    def rows(self) -> tuple[list[list[str]], bool]:
        """Rows of one text or two, and whether there were several rows."""
        if isinstance(self.inputs, str):
            return [[self.inputs]], False
        if self.inputs and isinstance(self.inputs[0], list):
            return self.inputs, True
        return [cast(list[str], self.inputs)], False


@router.post("/v1/classify")
async def create_classification(body: ClassifyRequest, context: Context) -> dict[str, Any]:
    """The most likely label of each input, and the probabilities of all labels."""
    if body.labels is not None:
        return await _by_labels(body, body.labels, context)
    target = await context.gateway.catalogue.find(body.model, (TEXT_CLASSIFICATION, IMAGE_CLASSIFICATION))
    parameters = body.request_parameters("truncate", "task", "level", "min_accuracy")
    classified = await _classify(context, target, body.rows(), parameters)
    data = [
        {
            "index": place,
            "label": label,
            "probs": classified.scores[place],
            "num_classes": classified.scores.shape[1],
            **{name: values[place] for name, values in classified.further.items()},
        }
        for place, label in enumerate(classified.best)
    ]
    return list_of("classify", body.model, data, classified.tokens)


async def _by_labels(body: ClassifyRequest, labels: Sequence[str], context: Context) -> dict[str, Any]:
    """The probability of each label for each image, by the cosines of their vectors."""
    target = await context.gateway.catalogue.find(body.model, (IMAGE_EMBEDDING,))
    _check_rows(target, body.rows())
    images = [image_file(row[0], f"input[{place}]", bare=True) for place, row in enumerate(body.rows())]
    if not 1 <= len(images) <= _MOST_ROWS:
        raise invalid("input", f"{len(images)} inputs", f"1 to {_MOST_ROWS}")
    scores, gammas, tokens = await zero_shot(context, target, images, labels, body.request_parameters())
    best = scores.argmax(axis=1).tolist()
    data = [
        {
            "index": place,
            "label": labels[best[place]],
            "probs": row.astype(np.float32),
            "num_classes": len(labels),
            "gamma": gammas[place],
        }
        for place, row in enumerate(scores)
    ]
    return list_of("classify", body.model, data, tokens)


async def _candidates(body: PredictRequest, labels: Sequence[str], context: Context) -> list[dict[str, Any]]:
    """The labels of an image with their scores, the likeliest first."""
    assert body.parameters is not None
    template = body.parameters.hypothesis_template
    if template.count("{}") != 1:
        raise invalid("parameters.hypothesis_template", template, "a text with one {}")
    target = await context.gateway.catalogue.only(body.model, (IMAGE_EMBEDDING,))
    if not isinstance(body.inputs, str):
        raise invalid("inputs", f"{len(body.inputs)} inputs", "one image in base64")
    image = image_file(body.inputs, "inputs", bare=True)
    texts = [template.replace("{}", label) for label in labels]
    scores, _, _ = await zero_shot(context, target, [image], texts, body.request_parameters())
    return [{"label": labels[place], "score": float(scores[0, place])} for place in order(scores[0])]


@router.post("/predict")
async def tei_predict(body: PredictRequest, context: Context) -> list[Any]:
    """All labels with their scores, the most likely first; a list of such lists for several inputs."""
    if body.parameters is not None and body.parameters.candidate_labels is not None:
        return await _candidates(body, body.parameters.candidate_labels, context)
    target = await context.gateway.catalogue.only(body.model, (TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION))
    if target.front.kind == TOKEN_CLASSIFICATION:
        return await _entities(body, context, target)
    strategy = body.strategy
    if strategy is not None:
        raise invalid("aggregation_strategy", strategy, f"left out: {target.name} classifies whole texts")
    rows, several = body.rows()
    classified = await _classify(context, target, rows, body.request_parameters(), body.raw_scores)
    ranked = [
        [{"label": classified.labels[place], "score": float(row[place])} for place in order(row)]
        for row in classified.scores
    ]
    return ranked if several else ranked[0]


async def _entities(body: PredictRequest, context: Context, target: Target) -> list[Any]:
    """The entities of a text, or a list of those of each."""
    require_output(target, "ENTITIES")
    parameters = body.request_parameters()
    parameters |= {} if body.strategy is None else {"aggregation_strategy": body.strategy}
    outputs, _ = await infer_texts(context, target, body.texts(), ["ENTITIES"], parameters)
    entities = [orjson.loads(row) for row in outputs["ENTITIES"].reshape(-1)]
    return entities[0] if isinstance(body.inputs, str) else entities


@dataclass(frozen=True)
class Classified:
    """Rows and their classes.

    scores    [n, classes], the logits where `raw` was asked for
    labels    of the classes
    best      the label of each row
    further   what else the front says of each row
    tokens    that the model read of all rows; 0 for images
    """

    scores: NDArray[np.float32]
    labels: Sequence[str]
    best: Sequence[str]
    further: Mapping[str, Sequence[Any]]
    tokens: int


async def _classify(
    context: Context, target: Target, rows: Sequence[Sequence[str]], parameters: Mapping[str, Any], raw: bool = False
) -> Classified:
    """The classes of rows, each of one text, of a pair, or of one image as a data URL.

    raw: whether the scores are logits, which a front needs the output LOGITS for. Raises ApiError, and as `infer_rows`.
    """
    if not 1 <= len(rows) <= _MOST_ROWS:
        raise invalid("input", f"{len(rows)} inputs", f"1 to {_MOST_ROWS}")
    served = target.front.names("outputs")
    names = [name for name in ("PROBABILITIES", "LABEL", *_FURTHER) if name in served]
    if raw or "PROBABILITIES" not in names:
        require_output(target, "LOGITS")
        names = ["LOGITS"]
    _check_rows(target, rows)
    outputs, tokens = await _infer(context, target, rows, names, parameters)
    if "PROBABILITIES" in names:
        scores = outputs["PROBABILITIES"]
    else:
        scores = outputs["LOGITS"] if raw else activated(target, outputs["LOGITS"]).astype(np.float32)
    # A model of several tasks states no labels: only the best one is known, by its own output.
    labels = target.front.names("labels")
    if len(labels) != scores.shape[1]:
        labels = [f"LABEL_{place}" for place in range(scores.shape[1])]
    if "LABEL" in names:
        best = [bytes(label).decode() for label in outputs["LABEL"].reshape(-1)]
    else:
        best = [labels[int(place)] for place in scores.argmax(axis=1)]
    further = {name.lower(): _plain(outputs[name]) for name in _FURTHER if name in names}
    return Classified(scores, labels, best, further, tokens)


def list_of(prefix: str, model: str, data: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """An answer of vLLM's with a list. prefix: of its id; tokens: that the model read."""
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {**head, "data": data, "usage": usage}


def order(scores: NDArray[Any]) -> list[int]:
    """The places of the scores, the highest first; equal ones in their order."""
    return [int(place) for place in np.argsort(-scores, kind="stable")]


def activated(target: Target, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The scores of logits [n, classes], by the function that the front states. Raises ApiError if it states none."""
    name = str(target.front.description.get("activation"))
    if name not in _ACTIVATIONS:
        text = f"model: {target.name} has activation {name}, not one of {', '.join(_ACTIVATIONS)}: build its engines"
        raise ApiError(400, text, param="model", code="model_not_supported")
    return _ACTIVATIONS[name](logits.astype(np.float64))


_ACTIVATIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    IDENTITY: lambda logits: logits,
    SIGMOID: lambda logits: 1.0 / (1.0 + np.exp(-logits)),
    SOFTMAX: softmax,
}


async def _infer(
    context: Context,
    target: Target,
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
    parameters: Mapping[str, Any],
) -> tuple[Tensors, int]:
    """As `infer_rows`. A call has rows of one text, or pairs."""
    groups = [[place for place, row in enumerate(rows) if len(row) == size] for size in (1, 2)]
    parts, tokens = [], 0
    for group in filter(None, groups):
        columns = _columns(target, [rows[place] for place in group])
        try:
            outputs, read = await infer_rows(context, target, columns, names, parameters)
        except ModelError as error:
            raise renumbered(error, group.__getitem__) from None
        parts.append(outputs)
        tokens += read
    order = np.argsort(np.concatenate(groups))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in names}, tokens


def _check_rows(target: Target, rows: Sequence[Sequence[str]]) -> None:
    description = target.front.description
    sizes = [size for size, served in ((1, not description.get("only_pairs")), (2, description.get("pairs"))) if served]
    for place, row in enumerate(rows):
        if len(row) not in sizes:
            allowed = f"{' or '.join(map(str, sizes))}, which {target.name} classifies"
            raise invalid(f"input[{place}]", f"{len(row)} texts", allowed)
        if not all(row):
            raise invalid(f"input[{place}]", "", "a text that is not empty")


def _columns(target: Target, rows: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    """The inputs for rows that all have as many texts."""
    if target.front.kind == IMAGE_CLASSIFICATION:
        column = np.empty((len(rows), 1), dtype=object)
        column[:, 0] = [image_file(row[0], f"input[{place}]") for place, row in enumerate(rows)]
        return {"IMAGE": column}
    columns = {"TEXT": text_column([row[0] for row in rows])}
    if len(rows[0]) == 2:
        columns["TEXT_PAIR"] = text_column([row[1] for row in rows])
    return columns


def _plain(values: NDArray[Any]) -> list[Any]:
    return [one.decode() if isinstance(one, bytes) else one for one in values.reshape(-1).tolist()]
