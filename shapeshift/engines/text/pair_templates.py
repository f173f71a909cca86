"""The texts around a query and a document that a chat template writes, for a decoder that says yes or no to a pair.

As in sentence-transformers and vLLM, the template gets one message of the role `query` and one of `document`. Prompts
are messages of the role `system`. A serving process does not import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines.text.tokenizer import PairTemplate, TextTokenizer
from shapeshift.engines.text.tokenizer_files import AWKWARD_TEXTS
from shapeshift.errors import InvalidInputError, UnsupportedError

_QUERY, _DOCUMENT = "8f41c2e0query", "8f41c2e0document"
# Options of sentence-transformers that no template reads.
_NOT_FOR_TEMPLATES = ("restore_suffix", "truncation", "max_length")


def read(library: Any, folder: Path, prompts: Mapping[str, str], template: str) -> dict[str, PairTemplate]:
    """By the name of a prompt, "" for none: what stands before, between and behind the two texts.

    library: transformers' tokenizer; template: Jinja source; empty: the checkpoint's own. Raises UnsupportedError for a
    template that does not hold both texts, once each, the query first; InvalidInputError for one that fails.
    """
    templates = {}
    for name, prompt in {"": "", **prompts}.items():
        text = _rendered(library, folder, _QUERY, _DOCUMENT, prompt, template)
        before, query, rest = text.partition(_QUERY)
        between, document, behind = rest.partition(_DOCUMENT)
        if not query or not document or any(one in behind + between for one in (_QUERY, _DOCUMENT)):
            raise UnsupportedError(
                f"pair_template: the chat template of {folder} does not write the texts of the roles query and "
                "document, once each in this order; name a Jinja file that does"
            )
        templates[name] = before, between, behind
    return templates


def require_texts(
    tokenizer: TextTokenizer,
    templates: Mapping[str, PairTemplate],
    library: Any,
    folder: Path,
    prompts: Mapping[str, str],
    template: str,
) -> None:
    """Raise UnsupportedError for a pair whose ids are not those of the library's chat template."""
    for name, parts in templates.items():
        for first, second in zip(AWKWARD_TEXTS, AWKWARD_TEXTS[1:], strict=False):
            text = _rendered(library, folder, first, second, prompts.get(name, ""), template)
            expected = library(text, add_special_tokens=False)["input_ids"]
            if len(expected) > tokenizer.max_tokens:
                continue
            if tokenizer.encode_in(parts, first.encode(), second.encode(), 0, False).tolist() != expected:
                pair = f"{(first, second)!r}"
                raise UnsupportedError(f"pair_template: the chat template of {folder} changes texts, such as {pair}")


def yes_and_no(library: Any) -> tuple[int, int]:
    """The tokens that sentence-transformers takes where the checkpoint does not say."""
    yes, no = library.convert_tokens_to_ids(["yes", "no"])
    if None in (yes, no) or library.unk_token_id in (yes, no):
        raise InvalidInputError("output", "LOGITS", "of a decoder whose tokenizer has the tokens yes and no")
    return int(yes), int(no)


def _rendered(library: Any, folder: Path, first: str, second: str, prompt: str, template: str) -> str:
    messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
    messages = [{"role": "system", "content": prompt}, *messages] if prompt else messages
    options = {"chat_template": template or None, "tokenize": False, **_options(folder)}
    try:
        return str(library.apply_chat_template(messages, **options))
    except Exception as error:  # noqa: BLE001  Jinja and transformers raise many types
        reason = str(error).partition("\n")[0]
        allowed = f"a chat template that takes the roles query and document ({reason})"
        raise InvalidInputError("pair_template", template[:40] or str(folder), allowed) from None


def _options(folder: Path) -> dict[str, Any]:
    """What sentence-transformers hands to the template, by the files of the folder."""
    options: dict[str, Any] = {}
    for file in sorted(folder.glob("sentence_*_config.json")):
        processing = json.loads(file.read_text(encoding="utf-8")).get("processing_kwargs") or {}
        options |= processing.get("chat_template") or {}
    return {name: value for name, value in options.items() if name not in _NOT_FOR_TEMPLATES}
