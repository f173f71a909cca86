"""Images in requests: vectors of them beside those of texts in one space, and labels by the cosines of both."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import ModelError
from shapeshift.gateway.apis.fields import Inputs, Item
from shapeshift.gateway.apis.pooling.vectors import softmax
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import Context
from shapeshift.gateway.errors import ApiError, invalid, overloaded
from shapeshift.gateway.text_rows import infer_rows, infer_texts, renumbered
from shapeshift.serving.description import EMBEDDING, IMAGE_EMBEDDING

_IMAGE_URL = "data:image/"
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg);base64,", re.IGNORECASE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_ALLOWED = "a data URL of a PNG or JPEG file: data:image/png;base64,..."
_MOST_INPUTS = 2048


@dataclass(frozen=True)
class Rows:
    """The rows of a request by their place: texts, and the files of images."""

    texts: Mapping[int, str]
    images: Mapping[int, bytes]


@dataclass(frozen=True)
class Vectors:
    """vectors [n, width]; tokens: that the model of texts read; gammas: of the rows that are images, by their place."""

    vectors: NDArray[np.float32]
    tokens: int
    gammas: Mapping[int, int]


def image_file(value: str, field: str, *, bare: bool = False) -> bytes:
    """The file in a data URL; its pixels are decoded, within their limit, by the model. bare: or in base64 alone.

    Raises ApiError naming the field. What stands at another host is never fetched.
    """
    head = _DATA_URL.match(value)
    if head is None and (not bare or _ELSEWHERE.match(value)):
        raise invalid(field, value, _ALLOWED)
    try:
        file = base64.b64decode(value[head.end() if head else 0 :], validate=True)
    except (binascii.Error, ValueError):
        allowed = f"{_ALLOWED}, or base64" if head is None else "valid base64 after the comma"
        raise invalid(field, value, allowed) from None
    if not file:
        raise ApiError(400, f"{field}: an image of 0 bytes", param=field, code="invalid_value")
    return file


def rows_of(target: Target, inputs: Inputs, modality: str | None) -> Rows | None:
    """The rows of `input`; None: they are texts or tokens, of a front that reads nothing else.

    A text that is a data URL is an image where the front reads images. Raises ApiError naming the first row that the
    front does not read.
    """
    reads_images = target.front.serves_as((IMAGE_EMBEDDING,))
    listed: Sequence[Any] = [inputs] if isinstance(inputs, str) else inputs
    has_items = any(isinstance(one, Item) for one in listed)
    if not (reads_images or has_items or modality == "image"):
        return None
    if not 1 <= len(listed) <= _MOST_INPUTS:
        raise invalid("input", f"{len(listed)} inputs", f"1 to {_MOST_INPUTS}")
    texts, images = dict[int, str](), dict[int, bytes]()
    for place, one in enumerate(listed):
        field = f"input[{place}]"
        if not isinstance(one, str | Item):
            raise invalid("input", "tokens", f"texts or images, which {target.name} reads")
        is_image = modality == "image" or (reads_images and isinstance(one, str) and one[:11].lower() == _IMAGE_URL)
        text, image = (one.text, one.image) if isinstance(one, Item) else (None, one) if is_image else (one, None)
        if image is not None and not reads_images:
            raise _unread(field, f"{target.name} reads texts, no images")
        if text is not None and reads_images and not target.front.description.get("text_model"):
            raise _unread(field, f"{target.name} reads images, no texts")
        if text == "":
            raise invalid(field, "", "a text that is not empty")
        if text is not None:
            texts[place] = text
        elif image is not None:
            images[place] = image_file(image, field, bare=isinstance(one, Item))
    return Rows(texts, images)


async def vectors_of(
    context: Context, target: Target, rows: Rows, parameters: Mapping[str, Any], of_texts: Mapping[str, Any]
) -> Vectors:
    """The vectors of rows, as of `rows_of`. of_texts: request parameters for the model of texts alone.

    Raises as `infer_rows`, naming the place of a row.
    """
    texts, images = await asyncio.gather(
        _texts(context, target, rows.texts, {**parameters, **of_texts}),
        _images(context, target, rows.images, parameters),
    )
    by_place = {**dict(zip(rows.texts, texts[0], strict=True)), **dict(zip(rows.images, images[0], strict=True))}
    vectors = np.stack([by_place[place] for place in range(len(by_place))])
    return Vectors(vectors, texts[1], dict(zip(rows.images, images[1], strict=True)))


async def zero_shot(
    context: Context, target: Target, images: Sequence[bytes], labels: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[NDArray[np.float64], Sequence[int], int]:
    """The scores [images, labels] of CLIP, which add up to 1, or of SigLIP, each by itself; the gammas of the images,
    and how many tokens the labels have. Raises as `infer_rows`; ApiError for a model without a tower for texts.
    """
    similarity = target.front.description.get("similarity")
    if similarity is None or not target.front.description.get("text_model"):
        raise _unread("labels", f"{target.name} reads images, no texts")
    if "" in labels:
        raise invalid(f"labels[{[*labels].index('')}]", "", "a text that is not empty")
    texts, of_images = await asyncio.gather(
        _texts(context, target, dict(enumerate(labels)), {"truncate": True}),
        _images(context, target, dict(enumerate(images)), parameters),
    )
    scale, bias = similarity
    logits = scale * np.stack(of_images[0]).astype(np.float64) @ np.stack(texts[0]).T
    scores = softmax(logits) if bias is None else 1.0 / (1.0 + np.exp(-(logits + bias)))
    return scores, of_images[1], texts[1]


def _unread(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="model_not_supported")


async def _texts(
    context: Context, target: Target, texts: Mapping[int, str], parameters: Mapping[str, Any]
) -> tuple[Sequence[NDArray[np.float32]], int]:
    if not texts:
        return [], 0
    front = target
    if not target.front.serves_as((EMBEDDING,)):
        front = await context.gateway.catalogue.find(str(target.front.description["text_model"]), (EMBEDDING,))
    try:
        outputs, tokens = await infer_texts(context, front, [*texts.values()], ["EMBEDDING"], parameters)
    except ModelError as error:
        raise renumbered(error, [*texts].__getitem__) from None
    return list(outputs["EMBEDDING"]), tokens


async def _images(
    context: Context, target: Target, images: Mapping[int, bytes], parameters: Mapping[str, Any]
) -> tuple[Sequence[NDArray[np.float32]], Sequence[int]]:
    """The vectors, and their gammas. Raises ApiError for an image that could not meet its deadline."""
    if not images:
        return [], []
    column = np.empty((len(images), 1), dtype=object)
    column[:, 0] = [*images.values()]
    names = ["EMBEDDING", "GAMMA", "OUTCOME"]
    try:
        outputs, _ = await infer_rows(context, target, {"IMAGE": column}, names, {**parameters, "task": EMBEDDING})
    except ModelError as error:
        raise renumbered(error, [*images].__getitem__) from None
    evicted = np.flatnonzero(outputs["OUTCOME"].reshape(-1) == b"evicted")
    if len(evicted):
        place = [*images][int(evicted[0])]
        raise overloaded(f"input[{place}]: the image could not meet its latency_ms, and was not computed; retry later")
    return list(outputs["EMBEDDING"]), outputs["GAMMA"].reshape(-1).tolist()
