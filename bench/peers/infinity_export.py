"""Export a checkpoint for infinity's optimum engine, in its environment: `infinity_export.py CHECKPOINT FILE`.

infinity takes any *.onnx below the model's folder; published models have `onnx/model.onnx`. optimum's exporter does not
work with this torch: it calls torch's newer export, which needs onnxscript.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModel

OPSET = 17
OUTPUT = "last_hidden_state"


class TokenEmbeddings(torch.nn.Module):
    """The encoder without pooling; positional int64 inputs [batch, length] in the order of `names`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(
            checkpoint,
            attn_implementation="eager",
            torch_dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
        )
        typed = getattr(self.encoder.config, "type_vocab_size", 0) > 1
        self.names = ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Float32 [batch, length, width]."""
        hidden: torch.Tensor = self.encoder(**dict(zip(self.names, tensors, strict=True)))[OUTPUT]
        return hidden


def export(checkpoint: Path, target: Path) -> None:
    """Write the fp32 ONNX file `target`, with dynamic batch and length."""
    model = TokenEmbeddings(checkpoint).eval()
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        model,
        tuple(torch.ones(2, 16, dtype=torch.int64) for _ in model.names),
        str(target),
        input_names=model.names,
        output_names=[OUTPUT],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in [*model.names, OUTPUT]},
        opset_version=OPSET,
        dynamo=False,
    )


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
