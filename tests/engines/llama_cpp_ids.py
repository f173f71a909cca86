"""What llama.cpp makes of texts: `llama_cpp_ids.py VOCABULARY.gguf`, in an environment that has llama-cpp-python.

Reads a JSON list of texts. Writes JSON: `whole`, the ids of each with its ends and with special tokens; `inner`, those
without the ends; `split`, those where special tokens are text; `pieces`, the bytes of each token, as Latin-1.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp as library

_quiet = library.llama_log_callback(lambda level, text, data: None)


def main(file: str) -> None:
    library.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = library.llama_model_default_params()
    params.vocab_only = True
    model = library.llama_model_load_from_file(file.encode(), params)
    assert model, "llama.cpp refuses the vocabulary"
    vocabulary = library.llama_model_get_vocab(model)
    texts = [text.encode() for text in json.load(sys.stdin)]
    modes = {"whole": (True, True), "inner": (False, True), "split": (False, False)}
    answer: dict[str, Any] = {
        name: [_ids(vocabulary, text, ends, special) for text in texts] for name, (ends, special) in modes.items()
    }
    count = library.llama_vocab_n_tokens(vocabulary)
    json.dump(answer | {"pieces": [_piece(vocabulary, token) for token in range(count)]}, sys.stdout)


def _ids(vocabulary: Any, text: bytes, ends: bool, special: bool) -> list[int]:
    ids = (library.llama_token * (len(text) + 8))()
    count = library.llama_tokenize(vocabulary, text, len(text), ids, len(ids), ends, special)
    assert count >= 0
    return list(ids[:count])


def _piece(vocabulary: Any, token: int) -> str:
    buffer = ctypes.create_string_buffer(4096)
    count = library.llama_token_to_piece(vocabulary, token, buffer, len(buffer), 0, False)
    assert count >= 0
    return buffer.raw[:count].decode("latin-1")


if __name__ == "__main__":
    main(sys.argv[1])
