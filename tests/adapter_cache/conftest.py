"""Fixtures of the adapter tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shapeshift.kernels import kernel_build
from tests.adapter_cache.lora_models import MIXED, make_adapter
from tests.compiled import KERNELS
from tests.fused_decode.checkpoints import make_checkpoint
from tests.gpu_kernels import interpreted

# Before a test imports torch: otherwise tests take minutes on busy cores.
kernel_build.limit_spinning()


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with its tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("base") / "small")


@pytest.fixture(scope="session")
def mixed_adapters(small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of all kinds over it."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder / name, small_base, spec, seed) for seed, (name, spec) in enumerate(MIXED.items())
    }


@pytest.fixture(scope="session")
def lora_kernels() -> Path:
    """The folder that keeps the compiled kernels between test runs."""
    return KERNELS


@pytest.fixture(scope="module")
def interpreted_add() -> Iterator[Any]:
    """`gpu_kernels.add_terms` as the interpreter of its language runs it, on a CPU."""
    with interpreted("shapeshift.adapter_cache.lora.gpu_kernels") as kernels:
        yield kernels.add_terms
