"""The checkpoint in transformers: the reference for verification, and the module that engines are exported from.

A serving process does not import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text.export_module import PackedEncoder
from shapeshift.engines.text.families import FAMILIES, family_of, first_position, longest_text
from shapeshift.engines.text.pooling import SentenceHead, dense_layers, pool_one
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.text.task_heads import linear_head, sequence_head, token_head
from shapeshift.errors import InvalidInputError, UnsupportedError

# The outputs that a checkpoint's own head computes, and transformers' class of such checkpoints.
_TASKS = {"LOGITS": "AutoModelForSequenceClassification", "TOKEN_LOGITS": "AutoModelForTokenClassification"}


class ReferenceModel:
    """The checkpoint computed by transformers in f32, one text at a time, without packing.

    modules: what makes EMBEDDING of the token vectors; outputs: of EMBEDDING, LOGITS, TOKEN_LOGITS and IMPORTANCE;
    layers: the number of first layers to compute, 0: all; head: a file with a linear head over EMBEDDING (`heads`),
    None: the checkpoint's own (for LOGITS); pairs: whether texts may be pairs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: SentenceModules,
        outputs: Sequence[str] = ("EMBEDDING",),
        layers: int = 0,
        head: Path | None = None,
        pairs: bool = False,
    ) -> None:
        self.family = family_of(checkpoint.config)
        self.outputs = tuple(outputs)
        self._modules = modules
        own = [name for name in _TASKS if name in outputs and not (name == "LOGITS" and head is not None)]
        if len(own) > 1:
            raise InvalidInputError("output", ", ".join(own), "one of them: a checkpoint has one head")
        if own and not self.family.classifies:
            raise UnsupportedError(f"{own[0]}: model_type {self.family.name}; it is served for {', '.join(FAMILIES)}")
        self._task = own[0] if own else ""
        self._model = _load(checkpoint, self._task, "IMPORTANCE" in outputs, layers)
        self._linear = linear_head(head) if head is not None else None
        self.max_tokens = longest_text({**checkpoint.config, "pad_token_id": self.padding})
        self.hidden = int(self._model.config.hidden_size)
        self._dense = dense_layers(modules)
        self._ids = int(self._model.config.vocab_size)
        self.type_stride = self._ids if pairs and int(getattr(self._model.config, "type_vocab_size", 0)) > 1 else 0

    @property
    def vocabulary(self) -> int:
        """The number of ids, including those of a pair's second text."""
        return self._ids + self.type_stride

    @property
    def padding(self) -> int | None:
        """The id that stands for no token. Models that look for it find the end, or the positions, of a text by it."""
        return self._model.config.pad_token_id  # type: ignore[no-any-return]

    @property
    def packs_rows(self) -> bool:
        return self.family.packs_rows

    @property
    def position_offset(self) -> int:
        return first_position(self.family, self.padding)

    def module(self) -> PackedEncoder:
        """The module that providers export."""
        head: nn.Module | None = self._linear
        if self._task:
            head = sequence_head(self._model) if self._task == "LOGITS" else token_head(self._model)
        base = self._model.base_model
        embedding = SentenceHead(self._modules)
        return PackedEncoder(base, self.family, embedding, self.outputs, head, self.type_stride).eval()

    def compute(self, ids: Ids) -> dict[str, Array]:
        """The outputs of one text: EMBEDDING [width], LOGITS [labels], TOKEN_LOGITS [tokens, labels],
        IMPORTANCE [tokens].
        """
        with torch.inference_mode():
            return {name: value.numpy() for name, value in self._compute(torch.from_numpy(ids)).items()}

    def _compute(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"output_attentions": "IMPORTANCE" in self.outputs}
        if self.type_stride:
            options["token_type_ids"] = (ids >= self.type_stride).long().unsqueeze(0)
            ids = ids % self.type_stride
        result = self._model.base_model(input_ids=ids.unsqueeze(0), **options)
        vector = self._dense(pool_one(result.last_hidden_state[0], self._modules.pooling))
        values = {"EMBEDDING": nn.functional.normalize(vector, dim=-1) if self._modules.normalize else vector}
        if self._task:
            values[self._task] = self._model(input_ids=ids.unsqueeze(0), **options).logits[0]
        elif self._linear is not None:
            values["LOGITS"] = self._linear(values["EMBEDDING"].unsqueeze(0))[0]
        if "IMPORTANCE" in self.outputs:
            values["IMPORTANCE"] = torch.stack(result.attentions).sum((0, 1, 2, 3))
        return {name: values[name] for name in self.outputs}


def _load(checkpoint: Checkpoint, task: str, with_attention: bool, layers: int) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _library_errors(checkpoint):
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
    if layers > config.num_hidden_layers:
        raise InvalidInputError("layers", layers, f"at most {config.num_hidden_layers} for this checkpoint")
    if layers:
        config.num_hidden_layers = layers
    with _library_errors(checkpoint):
        model, report = getattr(transformers, _TASKS.get(task, "AutoModel")).from_pretrained(
            checkpoint.folder,
            config=config,
            # Only the eager attention returns its probabilities; without a name, the model's fastest is taken.
            attn_implementation="eager" if with_attention else None,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    _refuse_missing(checkpoint, task, report["missing_keys"])
    return model.eval()


@contextlib.contextmanager
def _library_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn what transformers raises into an InvalidInputError of one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  transformers raises many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        allowed = f"a model that transformers reads ({reason})"
        raise InvalidInputError("checkpoint", str(checkpoint.folder), allowed) from error


def _refuse_missing(checkpoint: Checkpoint, task: str, missing: Sequence[str]) -> None:
    """Raise InvalidInputError for weights that transformers drew at random because the files lack them."""
    # Without a task's head nothing reads the pooler.
    needed = sorted(name for name in missing if task or not name.startswith("pooler."))
    if needed:
        kind = f"a checkpoint with a head for {task}" if task else "all weights of the model"
        raise InvalidInputError("checkpoint", str(checkpoint.folder), f"{kind} ({', '.join(needed[:3])} missing)")
