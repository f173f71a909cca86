"""The `model.py` of a plain Python backend over transformers: what waits becomes one padded batch.

Parameters: checkpoint, a folder; class, of transformers; dtype, of torch. An encoder pools by the mean, to length 1. A
decoder chooses greedily and answers when the longest answer of its batch is there.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One model on the device of its instance."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder, kind, dtype = (config["parameters"][name]["string_value"] for name in ("checkpoint", "class", "dtype"))
        is_on_gpu = args["model_instance_kind"] == "GPU"
        self._device = torch.device(f"cuda:{args['model_instance_device_id']}" if is_on_gpu else "cpu")
        model = getattr(transformers, kind).from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(self._device).eval()
        self._compute = self._encode
        if self._model.can_generate():
            self._compute = self._generate
            # No token ends an answer.
            self._model.generation_config.eos_token_id = None
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._input = config["input"][0]["name"]

    @torch.inference_mode()
    def execute(self, requests: list[Any]) -> list[Any]:
        texts = [_rows(request, self._input) for request in requests]
        padded = self._tokenizer(
            [text.decode() for rows in texts for text in rows], padding=True, return_tensors="pt"
        ).to(self._device)
        outputs = self._compute(padded, requests)
        ends = np.cumsum([len(rows) for rows in texts])[:-1]
        parts = [[pb_utils.Tensor(name, part) for part in np.split(rows, ends)] for name, rows in outputs.items()]
        return [pb_utils.InferenceResponse(list(tensors)) for tensors in zip(*parts, strict=True)]

    def _encode(self, padded: Any, requests: list[Any]) -> dict[str, Any]:
        states = self._model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).last_hidden_state
        mask = padded["attention_mask"][..., None].to(states.dtype)
        vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        return {"EMBEDDING": vectors.float().cpu().numpy()}

    def _generate(self, padded: Any, requests: list[Any]) -> dict[str, Any]:
        counts = np.concatenate([_rows(request, "max_tokens") for request in requests])
        answers = self._model.generate(
            input_ids=padded["input_ids"],
            attention_mask=padded["attention_mask"],
            max_new_tokens=int(counts.max()),
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )[:, padded["input_ids"].shape[1] :].tolist()
        texts = [self._tokenizer.decode(row[:count]) for row, count in zip(answers, counts, strict=True)]
        return {
            "text_output": np.array([[text.encode()] for text in texts], dtype=np.object_),
            "num_output_tokens": counts[:, None].astype(np.uint32),
        }


def _rows(request: Any, name: str) -> Any:
    """The values of an input [n, 1], one a row."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()[:, 0]
