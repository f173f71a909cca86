"""The adapter that a request names, before the request is parsed."""

from __future__ import annotations

import json

from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

_NAME, _SAMPLING = "lora_name", "sampling_parameters"


def named_adapter(pb_utils: PbUtils, request: InferenceRequest) -> str:
    """The value of `lora_name`, a parameter or in the input `sampling_parameters`; empty where there is none.

    What is invalid is left for the front that serves the request.
    """
    name = _stated(request.parameters().encode())
    tensor = None if name else pb_utils.get_input_tensor_by_name(request, _SAMPLING)
    if tensor is not None:
        name = next(map(_stated, tensor.as_numpy().reshape(-1)[:1].tolist()), "")
    return name


def _stated(text: bytes) -> str:
    if _NAME.encode() not in text:
        return ""
    try:
        found = json.loads(text).get(_NAME)
    except (ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""
