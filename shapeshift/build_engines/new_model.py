"""The folders of new front models: a config.pbtxt that leaves out all that follows from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.build_engines import decode
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.model_folder import CONFIG, HOW_TO_CALL, VERSION
from shapeshift.build_engines.recognition import Recognised, recognise
from shapeshift.build_engines.text import front as text_front
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.providers.lookup import is_native_faster
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.engines.text.families import family_of, longest_text
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.settings import FusedDecodeSettings, resolve
from shapeshift.token_adapt.checkpoints.reading import describe, open_vision

# Ends of the names of models beside one: what answers plain requests, and a tower for texts.
UNARY, TEXTS = "_unary", "_text"
# Fewer than the default, so that a model of 22 million weights answers within a minute of being added.
_BINS = "4"
# The paper's, for 196 patches and 12 layers; a model with fewer of both has fewer tokens to add or merge in a layer.
_GAMMAS = (-20, -15, -10, -5, 0, 2, 4, 8)
_CALL = "curl -s {{host}}:{{http_port}}/v2/models/{name}/{end} -d '{data}'\n"
_COLUMN = '{{"name":"{}","shape":[1,1],"datatype":"BYTES","data":["{}"]}}'
_TEXT = f'{{"inputs":[{_COLUMN.format("TEXT", "A text of any length.")}]}}'
_PAIR = f'{{"inputs":[{_COLUMN.format("TEXT", "What is red?")},{_COLUMN.format("TEXT_PAIR", "Roses are red.")}]}}'
# The gateway puts messages into the checkpoint's chat template.
_CHAT = (
    "curl -s 127.0.0.1:{{gateway_port}}/v1/chat/completions "
    '-d \'{{"model":"{name}","messages":[{{"role":"user","content":"What is a prime number?"}}],"max_tokens":60}}\'\n'
)
_PROMPT = '{"text_input":"Once upon a time","max_tokens":20}'
_PLAIN_PROMPT = '{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["Once upon a time"]}]}'
_PIXELS = '{"inputs":[{"name":"PIXELS","shape":[1,1,2,3],"datatype":"UINT8","data":[90,160,230,60,120,40]}]}'
_TASKS = """# For labels, a task: FOLDER has a folder of images for each of them.
shapeshift tasks train build/my-tasks/mine --model {name} --data FOLDER
shapeshift tasks register build/my-tasks/mine --model {name} --data FOLDER
"""

Files = Mapping[str, str]


def folders(
    name: str, checkpoint: str, folder: Path, recognised: Recognised, sizes: Mapping[str, str]
) -> dict[str, Files]:
    """The models that serve the checkpoint in `folder`, by name: the contents of their files by relative path.

    checkpoint: as config.pbtxt names it; sizes: parameters beside it, see `sizes_of`.
    """
    text = _PAIR if recognised.pairs else _TEXT
    calls = {text_front.BACKEND: ("infer", text), image_front.BACKEND: ("infer", _PIXELS)}
    end, data = calls.get(recognised.technique, ("generate", _PROMPT))
    call = _CHAT if recognised.chats else _CALL
    if recognised.technique == image_front.BACKEND:
        labels = describe(Checkpoint(folder, dict(recognised.config), "")).classifier is not None
        call = _CALL if labels or recognised.texts else _TASKS + _CALL
    parameters = {"checkpoint": checkpoint, **sizes, **({"text_model": name + TEXTS} if recognised.texts else {})}
    models = {name: _files(name, recognised, parameters, call, end, data)}
    if recognised.texts:
        tower = recognise(folder, text_front.BACKEND)
        sizes = sizes_of(tower, folder, 0.0, Path())
        models[name + TEXTS] = _files(name + TEXTS, tower, {"checkpoint": checkpoint, **sizes}, _CALL, "infer", _TEXT)
    if recognised.technique in (decode.BACKEND, decode.WITH_ADAPTERS):
        forwarding = Recognised(recognised.technique, recognised.because, recognised.config)
        models[name + UNARY] = _files(name + UNARY, forwarding, {"forward_to": name}, _CALL, "infer", _PLAIN_PROMPT)
    return models


def sizes_of(recognised: Recognised, folder: Path, available_mb: float, hashes: Path) -> dict[str, str]:
    """The parameters of the model in `folder` beside its checkpoint, where a default does not fit it or the machine.

    hashes: as for `open_checkpoint`.
    """
    if recognised.technique == text_front.BACKEND:
        longest = longest_text(recognised.config)
        limited = {"max_tokens": str(longest)} if longest < TextEngineSettings.max_tokens else {}
        if recognised.adapters:
            return {**limited, "adapter_mb": str(AdapterSettings.adapter_mb)}
        if family_of(recognised.config).pads:
            return {**limited, "bins": str(longest)}
        return {**limited, **({"provider": "native"} if is_native_faster(recognised.config) else {"max_bins": _BINS})}
    if recognised.technique == image_front.BACKEND:
        vision = open_vision(folder, hashes=hashes)[1].architecture
        gammas = sorted({round(gamma * vision.patches * 12 / (196 * vision.depth)) for gamma in _GAMMAS})
        # Prompts are of tasks, and vectors have none.
        gammas = [gamma for gamma in gammas if gamma <= 0 or not recognised.texts]
        return {} if gammas == list(_GAMMAS) else {"gammas": ",".join(map(str, gammas))}
    architecture = Architecture.read(folder)
    length = min(FusedDecodeSettings.max_length, architecture.max_position)
    # It imports torch.
    from shapeshift.fused_decode.loading import need_of

    defaults = FusedDecodeSettings(str(folder), max_length=length)
    need = need_of(architecture, defaults, resolve("auto", packed_bits=architecture.packed_bits))
    slots = max(1, min(defaults.max_concurrency, need.fitting(available_mb, defaults.max_concurrency)))
    return {"max_concurrency": str(slots), "max_length": str(length)}


def _files(name: str, recognised: Recognised, parameters: Mapping[str, str], call: str, end: str, data: str) -> Files:
    page = f"docs/{recognised.technique}.md"
    lines = [
        f"# Written by `shapeshift add`; {page} explains every parameter.",
        f"name: {_quoted(name)}",
        f"backend: {_quoted(recognised.technique)}",
        *_tensors("input", recognised.inputs if "checkpoint" in parameters else ()),
        *_tensors("output", recognised.outputs if "checkpoint" in parameters else ()),
        "parameters [",
        ",\n".join(
            f"  {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
        "]",
    ]
    called = call.format(name=name, end=end, data=data)
    return {CONFIG: "\n".join(lines) + "\n", HOW_TO_CALL: called, f"{VERSION}/.gitkeep": ""}


def _tensors(kind: str, names: Sequence[str]) -> list[str]:
    listed = ", ".join(f"{{ name: {_quoted(name)} }}" for name in names)
    return [f"{kind} [ {listed} ]"] if names else []


def _quoted(text: str) -> str:
    # The escapes of JSON are a part of those of protobuf's text format.
    return json.dumps(text, ensure_ascii=False)
