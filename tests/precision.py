"""What the precision of engines promises of their answers; the tests of real engines state it here alone."""

from __future__ import annotations

from pathlib import Path

from shapeshift.engines.verify import MIN_COSINE
from shapeshift.triton import model_config

# How far a label's probability may differ between two batches. A batch chooses the engine and the order of sums:
# f32 keeps five digits. bf16 keeps two to three of a logit, and a row that is nearly sure moves little more.
MAX_PROBABILITY_ERROR = {"f32": 1e-5, "bf16": 1e-2}


def of_model(repository: Path, name: str) -> str:
    """The precision that `make engines` wrote into the config.pbtxt of a model."""
    return model_config.parameters(model_config.read(repository / name / "config.pbtxt"))["precision"]


def least_cosine_with_reference(repository: Path, name: str) -> float:
    """The least cosine of a model's vector with the reference's."""
    return MIN_COSINE[of_model(repository, name)]


def least_cosine_of_two(repository: Path, name: str) -> float:
    """The least cosine of two vectors of one text, which may come from other engines and from other batches.

    Each lies within the tolerance of the reference, the angle a; two lie within 2a, and cos 2a = 2 cos(a)^2 - 1.
    """
    return 2 * least_cosine_with_reference(repository, name) ** 2 - 1
