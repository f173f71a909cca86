"""POST /v1/classify: the classes of texts, or of images in data URLs."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from shapeshift.gateway.http import bodies
from shapeshift.gateway.inference.classification import classify
from shapeshift.gateway.schemas.classify import ClassifyRequest
from shapeshift.gateway.state import answer, connected, gateway_of, id_of
from shapeshift.serving.description import IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION

router = APIRouter(tags=["classify"])


@router.post("/v1/classify", openapi_extra=bodies.described(ClassifyRequest))
async def create_classification(request: Request) -> Response:
    """The most likely label of each input, and the probabilities of all labels."""
    asked = await bodies.read(request, ClassifyRequest)
    gateway = gateway_of(request)
    target = await connected(request, gateway.catalogue.find(asked.model, (TEXT_CLASSIFICATION, IMAGE_CLASSIFICATION)))
    parameters = asked.parameters("truncate", "task", "level", "min_accuracy")
    work = classify(gateway, target, asked.rows(), parameters, id_of(request))
    found = await connected(request, work)
    data = [
        {
            "index": place,
            "label": label,
            "probs": found.scores[place],
            "num_classes": found.scores.shape[1],
            **{name: values[place] for name, values in found.further.items()},
        }
        for place, label in enumerate(found.best)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens, "completion_tokens": 0}
    head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": asked.model}
    return answer({**head, "data": data, "usage": usage})
