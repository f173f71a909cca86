"""Adapters over small encoders as PEFT saves them, and PEFT's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENCODER, CLASSIFIER = "AutoModel", "AutoModelForSequenceClassification"
TAGGER = "AutoModelForTokenClassification"
TASKS = {ENCODER: "FEATURE_EXTRACTION", CLASSIFIER: "SEQ_CLS", TAGGER: "TOKEN_CLS"}


def save_adapter(folder: Path, base: Path, kind: str = ENCODER, seed: int = 0, **config: Any) -> Path:
    """An adapter with random weights; config: of PEFT's LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(_base(base, kind), LoraConfig(task_type=TASKS[kind], **config))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def computed_by_peft(base: Path, adapter: Path | None, rows: Sequence[np.ndarray], kind: str = ENCODER) -> np.ndarray:
    """The mean vectors, of length 1, or the logits of each row alone; those of tokens for one row."""
    import torch
    from peft import PeftModel

    model = _base(base, kind)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    results = []
    with torch.inference_mode():
        for row in rows:
            output = model.eval()(input_ids=torch.from_numpy(row)[None])
            if kind != ENCODER:
                results.append(output.logits[0])
            else:
                results.append(torch.nn.functional.normalize(output.last_hidden_state[0].mean(0), dim=-1))
    return torch.stack(results).numpy()


def _base(folder: Path, kind: str) -> Any:
    import torch
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
