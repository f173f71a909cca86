"""The inputs of a load test, by what the model takes: texts, prompts, or images."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError, UnsupportedError
from shapeshift.workloads import lengths
from shapeshift.workloads.text import TextMaker

Entry: TypeAlias = Mapping[str, Any]
"""One request in perf_analyzer's form, by the name of the input: a list of values, {"b64": the tensor}, or
{"content": a list of values, "shape": theirs}, which an input of open length needs."""
LAWS = {"short": lengths.short(), "long": lengths.long()}
_SUFFIXES = (".jpg", ".jpeg", ".png")
_PIXELS = 224


@dataclass(frozen=True)
class Choice:
    """What to send. count: different requests; images: a folder of images, empty: made ones.

    lengths  of texts and prompts: short or long
    tokens   the answer to a prompt: `max_tokens`
    adapters names, in turn; those that a model with adapters has if empty
    """

    count: int = 500
    lengths: str = "short"
    tokens: int = 32
    images: str = ""
    adapters: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class LoadInputs:
    """The requests, what they are in words, and whether the model answers with a stream."""

    entries: Sequence[Entry]
    described: str
    streaming: bool


def make(url: str, model: str, choice: Choice, build: Path = Path("build")) -> LoadInputs:
    """Requests for `model` of the server at `url`, whose configuration says what it takes.

    build: the build folder of the server, for the names of adapters. Raises ShapeshiftError: no such model or server,
    or a model with inputs that no load test knows.
    """
    config = _config(url, model)
    decoupled = config.model_transaction_policy.decoupled
    names = {tensor.name for tensor in config.input}
    makers: dict[str, Callable[[], tuple[list[Entry], str]]] = {
        "TEXT": lambda: _texts(choice),
        "text_input": lambda: _prompts(choice, _adapters(config, model, choice, build), decoupled),
        "IMAGE": lambda: _images(choice),
    }
    for name, make in makers.items():
        if name in names:
            entries, described = make()
            return LoadInputs(entries, described, decoupled)
    raise UnsupportedError(f"model {model}: takes {', '.join(sorted(names))}; a load test knows {', '.join(makers)}")


def _config(url: str, model: str) -> Any:
    # Imported here: starting the command without a server needs no client.
    import tritonclient.grpc as grpc_client
    from tritonclient.utils import InferenceServerException

    try:
        with grpc_client.InferenceServerClient(url) as client:
            return client.get_model_config(model, client_timeout=10.0).config
    except InferenceServerException as error:
        if error.status() == "StatusCode.UNAVAILABLE" and "onnect" in str(error):
            raise ShapeshiftError(f"no server answers at {url}; is it running?") from None
        raise NotFoundError(f"model {model} at {url}: {error.message()}") from None


def _texts(choice: Choice) -> tuple[list[Entry], str]:
    return [{"TEXT": [text]} for text in _made_texts(choice)], f"texts, {choice.lengths}"


def _made_texts(choice: Choice) -> list[str]:
    rng = np.random.default_rng(choice.seed)
    maker = TextMaker(rng)
    return [maker.text(int(length)) for length in LAWS[choice.lengths].sample(rng, choice.count)]


def _prompts(choice: Choice, adapters: Sequence[str], decoupled: bool) -> tuple[list[Entry], str]:
    entries: list[Entry] = []
    for number, text in enumerate(_made_texts(choice)):
        prompt = {"content": [text], "shape": [1]}
        entry: dict[str, Any] = {"text_input": prompt, "max_tokens": [choice.tokens], "ignore_eos": [True]}
        if decoupled:
            entry["stream"] = [True]
        if adapters:
            entry["sampling_parameters"] = [json.dumps({"lora_name": adapters[number % len(adapters)]})]
        entries.append(entry)
    described = f"prompts, {choice.lengths}, answers of {choice.tokens} tokens"
    return entries, f"{described}, adapters {', '.join(adapters)}" if adapters else described


def _adapters(config: Any, model: str, choice: Choice, build: Path) -> Sequence[str]:
    """The adapters to name: those of `choice`, or those of the registry of `model`; none where it serves none."""
    if config.backend != "adapter_cache" or choice.adapters:
        return choice.adapters
    # Imported here: only these models need it.
    from shapeshift.adapter_cache.registry import store

    parameters = {name: value.string_value for name, value in config.parameters.items()}
    serving = parameters.get("forward_to", model)
    folder = build / "adapters" / serving
    names = sorted(store.read(folder))
    if not names:
        raise NotFoundError(f"adapters: none in {folder}; name some of the model's with --adapters")
    return names


def _images(choice: Choice) -> tuple[list[Entry], str]:
    if choice.images:
        files = sorted(file for file in Path(choice.images).glob("*") if file.suffix.lower() in _SUFFIXES)
        if not files:
            raise InvalidInputError("images", choice.images, f"a folder with {', '.join(_SUFFIXES)} files")
        contents, described = [file.read_bytes() for file in files[: choice.count]], f"images of {choice.images}"
    else:
        rng = np.random.default_rng(choice.seed)
        contents = [_made_image(rng) for _ in range(min(choice.count, 50))]
        described = f"made images of {_PIXELS} x {_PIXELS} pixels, JPEG"
    # Bytes are sent as they are: those of a string begin with its length.
    tensors = [struct.pack("<I", len(content)) + content for content in contents]
    return [{"IMAGE": {"b64": base64.b64encode(tensor).decode()}} for tensor in tensors], described


def _made_image(rng: np.random.Generator) -> bytes:
    """Smooth colours: noise of single pixels would take longer to decode than a photograph."""
    from PIL import Image

    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    stream = io.BytesIO()
    coarse.resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()
