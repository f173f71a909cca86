"""The native kernels as a CPU with AVX2 gets them, which has neither AVX-512 nor AMX; CPUs with these run them too."""

from __future__ import annotations

import pytest

from shapeshift.kernels import kernel_build
from tests.fused_decode import kernel_tests

FILES = (
    *("tests/fused_decode/test_decode_native.py", "tests/fused_decode/test_decode_quantised.py"),
    *("tests/fused_decode/test_decode_kv_precision.py", "tests/fused_decode/test_decode_states.py"),
    "tests/fused_decode/test_decode_experts.py",
)


@pytest.mark.long
@pytest.mark.skipif("avx2" not in kernel_build.cpu_flags().split(), reason="needs AVX2")
def test_kernels_of_avx2_compute_the_same() -> None:
    kernel_tests.passed("tests.fused_decode.avx2", *FILES)
