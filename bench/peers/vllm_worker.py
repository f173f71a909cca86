"""vLLM's engine on a CPU: `python -m bench.peers.vllm_worker CHECKPOINT PRECISION MAX_LENGTH [ADAPTER ...]`.

Runs in its own environment. PRECISION: of weights, keys and values. The scheduler keeps its defaults. ADAPTER: folders
of PEFT adapters; request i gets number i modulo their count.
"""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

from bench.peers.protocol import MOST_TOKENS, SEQUENCES, DecodeRequest, replay_in_steps, serve_decoding

BLOCK_TOKENS = 128
NAMES = {"f32": "float32", "bf16": "bfloat16"}


class Engine:
    """Requests join between two steps."""

    most = SEQUENCES

    def __init__(self, checkpoint: str, precision: str, max_length: int, adapters: list[str]) -> None:
        lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16} if adapters else {}
        arguments = EngineArgs(
            checkpoint,
            dtype=NAMES[precision],
            max_model_len=max_length,
            max_num_seqs=SEQUENCES,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=MOST_TOKENS // BLOCK_TOKENS,
            skip_tokenizer_init=True,
            **lora,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._adapters = [LoRARequest(str(number), number, path) for number, path in enumerate(adapters, 1)]
        self._running: dict[str, tuple[int, int]] = {}
        self._added = 0

    def add(self, number: int, request: DecodeRequest) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True, detokenize=False)
        name, adapters = str(self._added), self._adapters
        prompt = TokensPrompt(prompt_token_ids=request.prompt)
        lora = adapters[number % len(adapters)] if adapters else None
        self._engine.add_request(name, prompt, params, lora_request=lora)
        self._running[name] = number, 0
        self._added += 1

    def step(self) -> list[tuple[int, list[int]]]:
        generated = []
        for output in self._engine.step():
            (number, count), tokens = self._running[output.request_id], output.outputs[0].token_ids
            self._running[output.request_id] = number, len(tokens)
            generated.append((number, list(tokens[count:])))
        return generated

    def drop(self, number: int) -> None:
        """The engine drops a request with its last token."""


if __name__ == "__main__":
    checkpoint, precision, max_length, *adapters = sys.argv[1:]
    serve_decoding(partial(replay_in_steps, Engine(checkpoint, precision, int(max_length), adapters)))
