"""transformers' continuous batching: `python -m bench.peers.transformers_continuous FOLDER PRECISION THREADS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.peers.decode_worker import DecodeRequest, Replayed, send, serve
from bench.peers.transformers_models import load

PAGE, BLOCKS, REQUESTS, TOKENS = 32, 512, 32, 288


class Continuous:
    """One manager, with one queue for all answers."""

    def __init__(self, model: Any) -> None:
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=BLOCKS,
                max_requests_per_batch=REQUESTS,
                max_batch_tokens=TOKENS,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()

    def replay(self, requests: list[DecodeRequest]) -> Replayed:
        start = send(requests, self._submit)
        stamps: list[list[float]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        left = len(requests)
        while left:
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' generation thread has stopped")
                continue
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.is_finished():
                number = int(output.request_id.partition("/")[0])
                stamps[number] = [at - start for at in output.timestamps]
                tokens[number] = list(output.generated_tokens)
                left -= 1
        return Replayed(stamps, tokens)

    def _submit(self, number: int, request: DecodeRequest) -> None:
        self._manager.add_request(
            request.prompt,
            request_id=f"{number}/{id(request)}",
            max_new_tokens=request.new_tokens,
            record_timestamps=True,
        )


if __name__ == "__main__":
    folder, precision, threads = sys.argv[1:]
    serve(Continuous(load(Path(folder), precision, int(threads))).replay)
