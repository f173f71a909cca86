"""POST /embed and /predict of text-embeddings-inference (TEI). Its /rerank is in `rerank`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field

from shapeshift.gateway.apis.classify import classify
from shapeshift.gateway.apis.embeddings import cut, embed, of_length_1
from shapeshift.gateway.apis.fields import TEXTS, Rows, TeiRequest, Texts, listed
from shapeshift.gateway.apis.rerank import order
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.serving.description import EMBEDDING, TEXT_CLASSIFICATION

router = APIRouter(route_class=BodyRoute, tags=["text-embeddings-inference"])


class EmbedRequest(TeiRequest):
    """The body of POST /embed. normalize: false leaves the vectors as the model makes them, of length 1 for some."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "inputs", "INPUT_IDS": "inputs"}

    inputs: Texts = Field(description=TEXTS)
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class PredictRequest(TeiRequest):
    """The body of POST /predict."""

    made_of: ClassVar[Mapping[str, str]] = {"TEXT": "inputs", "TEXT_PAIR": "inputs"}

    inputs: Rows = Field(description="a text, a pair of texts, or a list of lists with one text or one pair each")
    raw_scores: bool = False

    def rows(self) -> tuple[list[list[str]], bool]:
        """Rows of one text or two, and whether there were several rows."""
        if isinstance(self.inputs, str):
            return [[self.inputs]], False
        if self.inputs and isinstance(self.inputs[0], list):
            return self.inputs, True
        return [cast(list[str], self.inputs)], False


@router.post("/embed")
async def tei_embed(body: EmbedRequest, context: Context) -> list[NDArray[Any]]:
    """A vector for each input."""
    target = await context.gateway.catalogue.only(body.model, (EMBEDDING,))
    vectors, _ = await embed(context, target, listed(body.inputs), body.request_parameters("prompt_name"))
    vectors = cut(target, vectors, body.dimensions)
    # TEI's default; nothing changes where the model does it already.
    return list(vectors if body.normalize is False else of_length_1(vectors))


@router.post("/predict")
async def tei_predict(body: PredictRequest, context: Context) -> list[Any]:
    """All labels with their scores, the most likely first; a list of such lists for several inputs."""
    target = await context.gateway.catalogue.only(body.model, (TEXT_CLASSIFICATION,))
    rows, several = body.rows()
    classified = await classify(context, target, rows, body.request_parameters(), body.raw_scores)
    ranked = [
        [{"label": classified.labels[place], "score": float(row[place])} for place in order(row)]
        for row in classified.scores
    ]
    return ranked if several else ranked[0]
