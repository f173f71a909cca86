"""The checkpoint in transformers: the reference for verification, and the module that engines are exported from.

A serving process does not import it.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shapeshift.engines import weight_headers
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text import tokenizer_files
from shapeshift.engines.text.export_module import PackedEncoder
from shapeshift.engines.text.families import FAMILIES, family_of, first_position, longest_text
from shapeshift.engines.text.pooling import SentenceHead, TokenVectors, dense_layers, pool_one, term_weights
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.text.task_heads import (
    add_updates,
    answer_head,
    language_head,
    linear_head,
    sequence_head,
    token_head,
)
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import InvalidInputError, UnsupportedError

# The outputs that a checkpoint's own head computes, and transformers' class of such checkpoints.
_TASKS = {
    "LOGITS": "AutoModelForSequenceClassification",
    "TOKEN_LOGITS": "AutoModelForTokenClassification",
    "TERM_WEIGHTS": "AutoModelForMaskedLM",
}
_HEADS: Mapping[str, Callable[[Any], nn.Module]] = {
    "LOGITS": sequence_head,
    "TOKEN_LOGITS": token_head,
    "TERM_WEIGHTS": language_head,
}
_TOWERS = [family.library for family in FAMILIES.values() if family.projection]
_TYPES = "token_type_ids"
_LAYER = re.compile(r"\.\d+\.")
# Of the largest value: computed twice by the same model, in batches of one text.
_TOLERANCE = 1e-3
# Characters of a text that an error shows.
_SHOWN = 80


class ReferenceModel:
    """The checkpoint computed by transformers in f32, one text at a time, without packing.

    modules: what makes vectors and weights of the token vectors; outputs: of `interfaces.OUTPUT_AXES`;
    layers: the number of first layers to compute, 0: all; head: a file with a linear head over EMBEDDING and updates of
    the layers (`heads`), None: the checkpoint's own (for LOGITS); answers: the tokens of which a decoder's LOGITS are
    made, see `answer_head`; pairs: whether texts may be pairs; library:
    transformers' tokenizer of the checkpoint, where it is loaded already.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: SentenceModules,
        outputs: Sequence[str] = ("EMBEDDING",),
        layers: int = 0,
        head: Path | None = None,
        pairs: bool = False,
        library: Any = None,
        answers: Sequence[int] = (),
    ) -> None:
        self._checkpoint, self._pairs, self._library = checkpoint, pairs, library
        self.family = family_of(checkpoint.config)
        self.outputs = tuple(outputs)
        self._modules = modules
        tasks = [name for name in _TASKS if name in outputs and not (name == "LOGITS" and head is not None)]
        if len(tasks) > 1:
            raise InvalidInputError("output", ", ".join(tasks), "one of them: a checkpoint has one head")
        if tasks and not self.family.classifies:
            raise UnsupportedError(f"{tasks[0]}: model_type {self.family.name}; it is served for {', '.join(FAMILIES)}")
        self._task = tasks[0] if tasks else ""
        self._answers = answers
        kind = "AutoModelForCausalLM" if answers else _TASKS.get(self._task, self.family.library)
        self._model = _load(checkpoint, self._task, kind, "IMPORTANCE" in outputs, layers)
        self._linear = linear_head(head) if head is not None else None
        if head is not None:
            add_updates(self._model.base_model, head)
        self.max_tokens = longest_text({**checkpoint.config, "pad_token_id": self.padding})
        self.hidden = int(self._model.config.hidden_size)
        self._dense = dense_layers(modules.dense)
        self._tokens = TokenVectors(modules, self.position_offset, self._unweighted())
        self._ids = int(self._model.config.vocab_size)
        self.type_stride = self._ids if pairs and self._is_given_types() else 0

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
        # Weights of the vocabulary for every token of many rows would be more than the memory.
        return self.family.packs_rows and "TERM_WEIGHTS" not in self.outputs

    @property
    def position_offset(self) -> int:
        return first_position(self.family, self.padding)

    def module(self) -> PackedEncoder:
        """The module that providers export."""
        head: nn.Module | None = self._linear
        if self._task:
            head = answer_head(self._model, self._answers) if self._answers else _HEADS[self._task](self._model)
        vectors = SentenceHead(self._modules), self._tokens
        base = self._model.base_model
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        of_head = [] if head is None else [names.get(id(parameter), "") for parameter in head.parameters()]
        head_names = of_head if all(of_head) else []
        return PackedEncoder(base, self.family, *vectors, self.outputs, head, self.type_stride, head_names).eval()

    def compute(self, ids: Ids) -> dict[str, Array]:
        """The outputs of one text, with the axes of `interfaces.OUTPUT_AXES`."""
        inputs = torch.from_numpy(ids)[None]
        if not self.type_stride:
            return self._compute({"input_ids": inputs})
        types = (inputs >= self.type_stride).long()
        return self._compute({"input_ids": inputs % self.type_stride, _TYPES: types})

    def require_texts(self, tokenizer: TextTokenizer) -> None:
        """Raise UnsupportedError naming a text or pair for whose ids by `tokenizer` the outputs are not those of the
        library's own call, `model(**tokenizer(text))`; InvalidInputError where it puts tokens into every text that the
        model lacks. The last text has as many tokens as the tokenizer lets through. Once the outputs of one text are
        the same, the same ids suffice, but for the last one."""
        are_known = False
        texts = tokenizer_files.awkward_texts(self._tokenizer)
        cases: list[tuple[str, str | None]] = [(text, None) for text in texts]
        cases += zip(texts, texts[1:], strict=False) if self._pairs else ()
        cases.append((_longest(tokenizer), None))
        for first, second in cases:
            pair = None if second is None else second.encode()
            ids = tokenizer.encode_with_offsets(first.encode(), pair, truncate=True).ids
            if int((ids % self.type_stride if self.type_stride else ids).max()) >= self._ids:
                # Such a text is refused when it is served.
                continue
            with _library_errors(self._checkpoint):
                inputs = self._inputs_of(first, second, tokenizer.max_tokens)
                if are_known and first is not cases[-1][0] and self._are_all(inputs, ids):
                    continue
                library = self._compute(inputs)
            are_known = True
            got = self.compute(ids)
            for name, expected in library.items():
                limit = _TOLERANCE * float(np.abs(expected).max())
                if got[name].shape != expected.shape or not np.abs(got[name] - expected).max() <= limit:
                    example = first if second is None else (first, second)
                    example = f"{first[:_SHOWN]}..." if len(first) > _SHOWN else example
                    kind = type(self._tokenizer).__name__
                    raise UnsupportedError(
                        f"{self._checkpoint.folder}: {name} of {example!r}, {len(ids)} tokens, is not what "
                        f"transformers computes with the tokenizer {kind}"
                    )

        if not are_known:
            kind = type(self._tokenizer).__name__
            allowed = (
                f"ids below {self._ids}, the vocab_size: those that transformers' {kind} puts into all texts are not; "
                "name another tokenizer_class in tokenizer_config.json, such as PreTrainedTokenizerFast"
            )
            raise InvalidInputError(tokenizer_files.FILE_NAME, str(self._checkpoint.folder), allowed)

    def _inputs_of(self, first: str, second: str | None, max_tokens: int) -> dict[str, torch.Tensor]:
        """What the library's tokenizer gives the model."""
        options: dict[str, Any] = {"padding": "max_length"} if self.family.pads else {}
        options |= {"truncation": True, "max_length": max_tokens, "return_tensors": "pt"}
        inputs = self._tokenizer(first, second, **options)
        accepted = {*inspect.signature(self._model.base_model.forward).parameters}
        accepted -= {"attention_mask"} if self.family.pads else set()
        return {name: values for name, values in inputs.items() if name in accepted}

    def _are_all(self, inputs: Mapping[str, torch.Tensor], ids: Ids) -> bool:
        """Whether `inputs` say what `ids` do, and no more."""
        stride = self.type_stride or self.vocabulary
        said = {"input_ids": ids % stride, _TYPES: ids // stride, "attention_mask": np.ones_like(ids)}
        if not inputs.keys() <= said.keys():
            return False
        # A model takes zeros for types that it is not given.
        complete = {_TYPES: np.zeros_like(ids), **{name: values[0].numpy() for name, values in inputs.items()}}
        return all(np.array_equal(values, said[name]) for name, values in complete.items())

    @cached_property
    def _tokenizer(self) -> Any:
        return self._library or tokenizer_files.of_library(self._checkpoint.folder, self._modules.lower_case)

    def _unweighted(self) -> list[int]:
        """The tokens that BGE-M3 gives no weight."""
        tokenizer = self._tokenizer if self._modules.token_weights else None
        names = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        ids = [getattr(tokenizer, name, None) for name in names]
        return sorted({int(one) for one in ids if one is not None})

    def _is_given_types(self) -> bool:
        """Whether the library gives the model the token types of a pair; if not, they are zeros."""
        kinds = int(getattr(self._model.config, "type_vocab_size", 0))
        return kinds > 1 and _TYPES in self._tokenizer.model_input_names

    def _compute(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        with torch.inference_mode():
            return {name: value.numpy() for name, value in self._outputs_of(inputs).items()}

    def _outputs_of(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {**inputs, "output_attentions": "IMPORTANCE" in self.outputs}
        result = self._model.base_model(**options)
        vector = self._dense(pool_one(result.last_hidden_state[0], self._modules.pooling))
        values = {"EMBEDDING": nn.functional.normalize(vector, dim=-1) if self._modules.normalize else vector}
        values |= self._of_tokens(result.last_hidden_state[0], inputs["input_ids"][0])
        if self._task == "TERM_WEIGHTS":
            weights = term_weights(self._model(**options).logits[0], self._modules.terms)
            values[self._task] = weights.sum(0) if "sum" in self._modules.terms else weights.amax(0)
        elif self._answers:
            logits = self._model(**options).logits[0, -1, list(self._answers)]
            values["LOGITS"] = logits[:1] - logits[1:] if len(logits) > 1 else logits
        elif self._task:
            values[self._task] = self._model(**options).logits[0]
        elif self._linear is not None:
            values["LOGITS"] = self._linear(values["EMBEDDING"].unsqueeze(0))[0]
        if "IMPORTANCE" in self.outputs:
            values["IMPORTANCE"] = torch.stack(result.attentions).sum((0, 1, 2, 3))
        return {name: values[name] for name in self.outputs}

    def _of_tokens(self, hidden: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """As BGE-M3's own library has them, of token vectors [tokens, hidden]."""
        vectors, values = self._tokens.dense, {"TOKEN_EMBEDDING": hidden}
        if vectors is not None:
            rest = nn.functional.normalize(vectors(hidden[1:]), dim=-1)
            values["TOKEN_EMBEDDING"] = torch.cat([torch.zeros(1, rest.shape[1]), rest])
        if self._tokens.weight is not None:
            weights = self._tokens.weight(hidden)[:, 0]
            values["TOKEN_WEIGHTS"] = weights * ~torch.isin(ids, torch.tensor(self._unweighted()))
        return values


def _longest(tokenizer: TextTokenizer) -> str:
    """A text that fills the tokenizer's limit."""
    text = " ".join(tokenizer_files.AWKWARD_TEXTS)
    return " ".join([text] * (1 + tokenizer.max_tokens // max(1, len(tokenizer.encode_piece(text)))))


def _load(checkpoint: Checkpoint, task: str, kind: str, with_attention: bool, layers: int) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _library_errors(checkpoint):
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        # Of a model of images and texts that of its tower.
        config = getattr(config, "text_config", config) if kind in _TOWERS else config
    if layers > config.num_hidden_layers:
        raise InvalidInputError("layers", layers, f"at most {config.num_hidden_layers} for this checkpoint")
    if layers:
        config.num_hidden_layers = layers
    with _library_errors(checkpoint):
        model, report = getattr(transformers, kind).from_pretrained(
            checkpoint.folder,
            config=config,
            # Only the eager attention returns its probabilities; without a name, the model's fastest is taken.
            attn_implementation="eager" if with_attention else None,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    _refuse_missing(checkpoint, task, report["missing_keys"])
    _refuse_left_out(checkpoint, model, report["unexpected_keys"])
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


def _refuse_left_out(checkpoint: Checkpoint, model: Any, unexpected: Sequence[str]) -> None:
    """Raise UnsupportedError for weights of the embeddings and layers that transformers leaves out, such as those of
    relative positions: the library that the model was trained with uses them.

    Poolers, other heads and the layers beyond those that are computed may be left out.
    """
    base = model.base_model
    parts = {name for name, _ in base.named_children() if name != "pooler"}
    used = {_LAYER.sub(".", name) for name in base.state_dict()}
    headers = weight_headers.read(checkpoint.folder)
    for name in sorted(unexpected):
        inner = name.removeprefix(f"{model.base_model_prefix}.")
        # A buffer, such as the numbers of positions, is none of the weights.
        is_weight = name not in headers or headers[name].dtype in weight_headers.FLOATS
        if inner.partition(".")[0] in parts and is_weight and _LAYER.sub(".", inner) not in used:
            raise UnsupportedError(
                f"checkpoint: {checkpoint.folder} has {name}, which the {type(model).__name__} of transformers leaves "
                "out: its vectors are not those that the model was trained for"
            )
