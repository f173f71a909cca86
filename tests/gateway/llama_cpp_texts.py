"""llama.cpp's greedy answers: run by the interpreter of its environment, see `bench.peers.venv`.

Argument: a GGUF file. Reads a JSON list of [tokens of a prompt, JSON schema of the answer or null, most tokens of it],
and prints the texts likewise.
"""

from __future__ import annotations

import json
import sys

import llama_cpp

if __name__ == "__main__":
    model = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False)
    texts = []
    for prompt, schema, most in json.load(sys.stdin):
        grammar = schema and llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        answer = model.create_completion(prompt, max_tokens=most, temperature=0.0, repeat_penalty=1.0, grammar=grammar)
        texts.append(answer["choices"][0]["text"])
    print(json.dumps(texts))
