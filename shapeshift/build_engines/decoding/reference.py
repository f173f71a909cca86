"""Holds a model that generates against transformers before it is published: its logits, its chats."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeshift import files
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.engines.hardware import available_mb, cores
from shapeshift.engines.text import tokenizer_files
from shapeshift.engines.text.chat_template_files import ChatTemplateFiles
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.formats.packing import GGUF

if TYPE_CHECKING:
    import torch

MOST_TOKENS, PIECE = 512, 64
"""Tokens of the text, and of one step of ours."""
_AS_LIBRARY = "logits as transformers'"
TOLERANCE = 1e-3
"""Most difference of two logits, as a share of the largest one: both are computed in f32."""
_CHAT = (("user", "Who wrote it, in 1843?"), ("assistant", "Ada."), ("user", "Why?"))
_EXCERPT = 40


def require_rendering(library: Any, templates: ChatTemplateFiles, folder: Path) -> None:
    """Raise UnsupportedError unless a short chat becomes the text that `apply_chat_template` makes of it.

    library: the tokenizer of transformers; templates: those that are published; folder: of the checkpoint. A template
    may refuse the chat.
    """
    # A published model does not need Jinja to be built again.
    from shapeshift.serving.chat_templates.conversation import ChatTemplate

    source = templates.text
    if source is None:
        return
    as_text, as_parts = (
        [{"role": role, "content": content} for role, content in chat]
        for chat in (_CHAT, [(role, [{"type": "text", "text": text}]) for role, text in _CHAT])
    )
    got = _text_or_empty(lambda: ChatTemplate(source, templates.special_tokens).render(as_text, None))
    render = partial(library.apply_chat_template, tokenize=False, add_generation_prompt=True)
    of_text, of_parts = (_text_or_empty(partial(render, chat)) for chat in (as_text, as_parts))
    # Templates that read parts write no text.
    content = _CHAT[0][1]
    expected = of_parts if content in of_parts and content not in of_text else of_text
    if got != expected:
        place = len(os.path.commonprefix([got, expected]))
        ours, theirs = (text[place:][:_EXCERPT] for text in (got, expected))
        raise UnsupportedError(
            f"{folder}: of a short chat, the chat template makes {ours!r} at character {place}, and {theirs!r} by "
            "transformers' apply_chat_template ('' where it ends or refuses)"
        )


def _text_or_empty(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception:  # noqa: BLE001  a template may raise whatever Python does
        return ""


def require_logits(checkpoint: Checkpoint, library: Any, native: bool, remembered: Path, kernels: Path) -> str:
    """Raise UnsupportedError unless the logits of awkward texts are those of transformers, both in f32.

    Returns what was found, for the summary: also why a model was not compared. The file `remembered` keeps it by the
    hash of the checkpoint. library: its tokenizer; kernels: the folder of compiled kernels.
    """
    key = f"{checkpoint.sha256}:{checkpoint.tokenizer_sha256}"
    compared = remembered.read_text().split() if remembered.is_file() else []
    if key in compared:
        return _AS_LIBRARY
    result = _compared(checkpoint, library, native, kernels)
    if result == _AS_LIBRARY:
        files.replace_text(remembered, "\n".join([*compared, key]))
    return result


def _compared(checkpoint: Checkpoint, library: Any, native: bool, kernels: Path) -> str:
    # These import torch.
    from shapeshift.fused_decode.model.tensor_layout import weight_bytes

    architecture = Architecture.read(checkpoint.folder)
    if architecture.packing is not None and architecture.packing.method != GGUF:
        return "not compared with transformers: its weights are quantised"
    # Ours and the library's, while it reads the files.
    needed_mb = 3 * weight_bytes(architecture, "f32") >> 20
    if needed_mb > (free_mb := available_mb()):
        return f"not compared with transformers: {needed_mb} MiB needed, {free_mb:.0f} MiB available"
    texts = "\n".join(tokenizer_files.awkward_texts(library))
    tokens = [token for token in library(texts)["input_ids"] if token < architecture.vocab_size]
    count = min(MOST_TOKENS, architecture.max_position) - 1
    tokens = (tokens * -(-count // len(tokens)))[:count]
    try:
        expected = _of_library(checkpoint, tokens)
    except Exception as error:  # noqa: BLE001  transformers raises many types for a model that it does not compute
        return f"not compared with transformers: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
    got = _of_ours(checkpoint, tokens, native, kernels)
    difference = (got - expected).abs().amax(-1)
    largest = float(expected.abs().max())
    place = int(difference.argmax())
    if not float(difference[place]) <= TOLERANCE * largest:
        token = library.convert_ids_to_tokens(tokens[place])
        raise UnsupportedError(
            f"{checkpoint.folder}: behind token {place} ({token!r}) a logit differs by {float(difference[place]):.3g} "
            f"from transformers' (the largest is {largest:.3g}): the model is not computed as its library computes it"
        )
    return _AS_LIBRARY


def _of_library(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    """FLOAT32 [tokens, vocabulary]."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    entries = gguf_tensors.read_index(checkpoint.folder)
    if entries:
        plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        config = transformers.AutoConfig.for_model(**plain)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        numbers = {name: gguf_tensors.numbers(checkpoint.folder, entry) for name, entry in entries.items()}
        model.load_state_dict({name: torch.from_numpy(values) for name, values in numbers.items()}, strict=False)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
        ).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def _of_ours(checkpoint: Checkpoint, tokens: list[int], native: bool, kernels: Path) -> torch.Tensor:
    """FLOAT32 [tokens, vocabulary]."""
    import torch

    from shapeshift.fused_decode.interfaces import StepBatch
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions

    model = DecodeModel.load(
        checkpoint.folder,
        ModelOptions(
            precision="f32", slots=1, max_length=len(tokens) + 1, threads=cores(), native=native, cache_dir=kernels
        ),
    )
    slot, pieces = torch.zeros(1, dtype=torch.int32), []
    for start in range(0, len(tokens), PIECE):
        piece = torch.tensor(tokens[start : start + PIECE])
        places = torch.arange(len(piece))
        pieces.append(
            model.forward(StepBatch(piece, slot, slot + start, slot + len(piece), places[:0], further=places)).clone()
        )
    return torch.cat(pieces)
