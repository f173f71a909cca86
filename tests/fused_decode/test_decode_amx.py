"""The native kernels as a CPU with AMX gets them, whose tiles are emulated: CPUs without AMX run them too."""

from __future__ import annotations

import pytest

from shapeshift.kernels import kernel_build
from tests.fused_decode import kernel_tests

FILES = ("tests/fused_decode/test_decode_native.py", "tests/fused_decode/test_decode_quantised.py")
# What every CPU with AMX has beside its tiles.
_NEEDED = {"avx512_bf16", "avx512_vnni"}


@pytest.mark.long
@pytest.mark.skipif(not _NEEDED.issubset(kernel_build.cpu_flags().split()), reason="needs avx512_bf16 and VNNI")
def test_kernels_of_amx_compute_the_same() -> None:
    kernel_tests.passed("tests.fused_decode.amx", *FILES)
