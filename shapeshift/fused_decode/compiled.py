"""A folder of kernels as a shared library: compiled once for this machine, compiler and torch, and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from shapeshift import files

KERNELS = Path(__file__).with_name("kernels")
_COMPILER = "g++"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_WIDE = ("-mprefer-vector-width=512",)
_TIMEOUT_S = 600.0


def library(cache_dir: Path, folder: Path | None = None, name: str = "decode") -> Path:
    """The compiled *.cpp of `folder` (KERNELS), made in `cache_dir` unless they lie there: some twenty
    seconds, the first time.

    Processes that start together compile once. Raises OSError where there is no compiler or the folder
    cannot be written, subprocess.SubprocessError where the compiler fails.
    """
    folder = folder or KERNELS
    compiler = shutil.which(_COMPILER)
    if compiler is None:
        raise FileNotFoundError(f"no {_COMPILER} found")
    cpu = _cpu_flags()
    flags = [*_FLAGS, *(_WIDE if "avx512f" in cpu.split() else ())]
    target = cache_dir / f"{name}-{_key(compiler, flags, cpu, folder)}.so"
    if target.is_file():
        return target
    with files.exclusive(target.with_suffix(".lock")):
        if not target.is_file():
            _compile(compiler, flags, target, folder)
    return target


def reason(error: Exception) -> str:
    """In one line why there is no library."""
    if isinstance(error, subprocess.CalledProcessError):
        errors = [line for line in str(error.stderr).splitlines() if "error" in line] or ["no message"]
        return f"{error.cmd[0]} failed: {errors[0]}"
    return str(error)


def _compile(compiler: str, flags: list[str], target: Path, folder: Path) -> None:
    root = Path(torch.__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    codes = [target.with_suffix(f".{source.stem}.{os.getpid()}.o") for source in sources]
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    includes = [f"-I{KERNELS}", f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Linked with the OpenMP library that torch brings, so that the process has one pool of threads.
    openmp = [str(path) for path in sorted((root / "lib").glob("libgomp*.so*"))[:1]] or ["-lgomp"]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", *openmp]
    try:
        for source, code in zip(sources, codes, strict=True):
            _run([compiler, *flags, "-fopenmp", "-fPIC", abi, *includes, "-c", str(source), "-o", str(code)])
        _run([compiler, "-shared", *map(str, codes), "-o", str(fresh), *libraries])
        fresh.replace(target)
    finally:
        for made in (*codes, fresh):
            made.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _key(compiler: str, flags: list[str], cpu: str, folder: Path) -> str:
    """Of everything that the compiled code depends on: sources, compiler and its flags, CPU, torch."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    sources = [path.read_text(encoding="utf-8") for path in sorted({*folder.iterdir(), *KERNELS.glob("*.h")})]
    parts = [*sources, version, *flags, cpu, torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """The instruction sets of this CPU, as one line; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
