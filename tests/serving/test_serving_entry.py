"""What a model's process looks for before it opens a front."""

from __future__ import annotations

import numpy as np
import pytest

from shapeshift.serving.front import EntryPoint
from tests import fakes


class _MisreadTensor(fakes.Tensor):
    """As the stub of 24.10 reads an array of numpy 2."""

    def as_numpy(self) -> np.ndarray:
        return np.zeros_like(super().as_numpy())


def test_a_stub_that_misreads_arrays_loads_no_model() -> None:
    entry, pb_utils = EntryPoint(), fakes.PbUtils()
    pb_utils.Tensor = _MisreadTensor
    entry.pb_utils = pb_utils  # type: ignore[misc]
    with pytest.raises(fakes.TritonModelException, match=f"numpy {np.__version__} wrongly; install numpy<2"):
        entry.initialize({})
