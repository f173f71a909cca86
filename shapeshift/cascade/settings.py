"""What a cascade states in its config.pbtxt: parameters, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shapeshift.engines.execution.executor import ExecutorSettings
from shapeshift.serving.model_args import DESCRIPTION, Signature, Tensor
from shapeshift.serving.text_inputs import NUM_TOKENS, TEXT_PAIR
from shapeshift.settings import require

# Optional, so that a request for DESCRIPTION needs none.
_TEXT = Tensor("TEXT", "TYPE_STRING", optional=True)
_OUTPUTS = (
    Tensor("LABEL", "TYPE_STRING"),
    Tensor("PROBABILITIES", "TYPE_FP32", (None,)),
    Tensor("CONFIDENCE", "TYPE_FP32"),
    Tensor("LEVEL", "TYPE_INT32"),
    Tensor("WORDS_PRUNED", "TYPE_INT32"),
    Tensor("ENGINE_MS", "TYPE_FP32"),
    Tensor("CONTROL_MS", "TYPE_FP32"),
    NUM_TOKENS,
    DESCRIPTION,
)


@dataclass(frozen=True)
class CascadeSettings(ExecutorSettings):
    """Parameters of the serving process. Those of `ExecutorSettings` are about the first level; but `queue_rows` is
    also the most calls to later levels that run: a text whose call does not fit keeps its answer so far.

    candidates_dir   registry.json and the candidate tables: a folder, absolute, in the model's folder, or
                     under build/checkpoints/ or checkpoints/
    task             the task to serve, by the candidate that the registry names
    slo_ms           latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    """

    candidates_dir: str
    task: str
    slo_ms: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.candidates_dir), "candidates_dir", self.candidates_dir, "a folder")
        require(bool(self.task), "task", self.task, "a task of the registry")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")


@dataclass(frozen=True)
class GeneratedCascadeSettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    engines_dir  folder of all models' engines, relative to the model's folder
    device_memory  what the first level wants of its GPU's memory, see `engines.device_plan`
    """

    engines_dir: str = ""
    device_memory: str = ""


def signature(parameters: Mapping[str, str], pairs: bool | None = None) -> Signature:
    """Of a front. pairs: whether its task classifies pairs of texts; None: not known, so its config.pbtxt decides."""
    second = Tensor(TEXT_PAIR, "TYPE_STRING", optional=True, listed=pairs is None)
    return Signature((_TEXT,) if pairs is False else (_TEXT, second), _OUTPUTS)
