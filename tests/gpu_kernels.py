"""Modules of kernels for a GPU on a machine without one: interpreted, or compiled and not run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
}


def require_package() -> None:
    """Skip the test without the package in whose language the kernels are."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the kernels need the package triton, which torch for CUDA brings")


@contextmanager
def interpreted(name: str) -> Iterator[Any]:
    """The module `name`, interpreted. What is imported later is compiled, whether torch has imported the package before
    or this is the first to do it.
    """
    require_package()
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def interpret(function: Any, *args: Any, **named: Any) -> Any:
        return call(InterpretedFunction(function.fn), *args, **named)

    def call(function: Any, *args: Any, **named: Any) -> Any:
        # As the package does it, which leaves its language changed: nothing could be compiled later in this process.
        changed = interpreter._patch_lang(function.fn)
        try:
            return function.rewrite()(*args, **named)
        finally:
            changed.restore()

    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules.pop(name, None)
    try:
        # The package's own functions are for a GPU: torch may have imported it before.
        with (
            mock.patch.object(JITFunction, "__call__", interpret),
            mock.patch.object(InterpretedFunction, "__call__", call),
        ):
            yield importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


class Recorder:
    """Stands for a kernel: keeps what it is called with. `launches`: arguments and named arguments of each."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size >= 1 for size in grid)
        return lambda *args, **named: self.launches.append((args, named))

    def shared_bytes(self, capability: int) -> int:
        """Compile every launch for GPUs of this compute capability (90: 9.0), as it would be compiled there, and
        without one. Returns the most bytes of shared memory that one wants."""
        return max(_shared_bytes(self.kernel, args, named, capability) for args, named in self.launches)


def _shared_bytes(kernel: Any, args: tuple[Any, ...], named: dict[str, Any], capability: int) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, options = kernel.arg_names, {name: value for name, value in named.items() if name.startswith("num_")}
    given = dict(zip(names, args, strict=False)) | {name: value for name, value in named.items() if name in names}
    constants = {(names.index(name),): value for name, value in given.items() if name not in names[: len(args)]}
    constants |= {(place,): value for place, value in enumerate(args) if value is None}
    signature = {name: "constexpr" if (names.index(name),) in constants else _type(given[name]) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, value in enumerate(args)
        if _is_aligned(value, kernel.params[place])
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any, parameter: Any) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
