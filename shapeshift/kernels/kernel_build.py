"""Native kernels as shared libraries: compiled once for this machine, compiler and torch; what comes before torch.

The headers beside this module are those that the kernels of several packages include.

Imports no torch at first, so that `limit_spinning` and `import_torch` can run before torch is imported.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType

from shapeshift import files
from shapeshift.engines import hardware

Progress = Callable[[str], None]
HEADERS = Path(__file__).parent
COMPILER = "g++"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_WIDE = ("-mprefer-vector-width=512",)
_TIMEOUT_S = 3600.0
_PROGRESS_S = 1.0
SPIN_COUNT = 3000
_UNUSED = ("torch._meta_registrations", "torch.export")
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Make waiting OpenMP threads sleep after some tens of microseconds; call it before torch is imported.

    By default they stay awake for milliseconds. Where another program needs a core, the thread that all others wait
    for then loses its core: the rate falls to a third or less instead of by a third.

    A choice that the environment holds already stays. Returns whether there is a choice that torch will see.
    """
    if any(name in environment for name in _SPIN_VARIABLES):
        return True
    if "torch" in sys.modules:
        return False
    environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


def import_torch() -> None:
    """Import torch without what only its compilers and exporters ask for: a third of the time less.

    Whoever compiles or exports imports these modules. Nothing happens where torch is imported already.
    """
    if "torch" in sys.modules:
        return
    sys.modules |= {name: ModuleType(name) for name in _UNUSED}
    try:
        with no_collections():
            import torch  # noqa: F401
    finally:
        for name in _UNUSED:
            del sys.modules[name]


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Python looks for no garbage inside: an import makes none, and to look takes a seventh of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def library(cache_dir: Path, folder: Path, name: str, progress: Progress = lambda step: None) -> Path:
    """The library of the *.cpp in `folder`, compiled into `cache_dir` at the first use in about a minute.

    Processes that start together compile once. progress: called each second meanwhile, with what is compiled. Raises
    OSError where there is no compiler or `cache_dir` cannot be written, subprocess.SubprocessError where the compiler
    fails.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise FileNotFoundError(f"no {COMPILER} found")
    cpu = cpu_flags()
    flags = [*_FLAGS, *(_WIDE if "avx512f" in cpu.split() else ())]
    target = cache_dir / f"{name}-{_key(compiler, flags, cpu, folder)}.so"
    if target.is_file():
        return target
    with files.exclusive_lock(target.with_suffix(".lock")):
        if not target.is_file():
            _compile(compiler, flags, target, folder, progress)
    return target


def reason(error: Exception) -> str:
    """Why the library could not be built, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        errors = [line for line in str(error.stderr).splitlines() if "error" in line] or ["no message"]
        return f"{error.cmd[0]} failed: {errors[0]}"
    return str(error)


def _compile(compiler: str, flags: list[str], target: Path, folder: Path, progress: Progress) -> None:
    import torch

    root = Path(torch.__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    codes = [target.with_suffix(f".{source.stem}.o") for source in sources]
    fresh = target.with_suffix(".tmp")
    includes = [f"-I{HEADERS}", f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Linked with the OpenMP library of torch, so that the process has one pool of threads.
    openmp = [str(path) for path in sorted((root / "lib").glob("libgomp*.so*"))[:1]] or ["-lgomp"]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", *openmp]
    try:
        what = f"compiling the {target.name.partition('-')[0]} kernels for this CPU, once, in a minute or more"
        command = [compiler, *flags, "-fopenmp", "-fPIC", abi, *includes]
        _run_all(
            [[*command, "-c", str(source), "-o", str(code)] for source, code in zip(sources, codes, strict=True)],
            lambda done: progress(f"{what}: {done} of {len(sources)} files"),
        )
        _run([compiler, "-shared", *map(str, codes), "-o", str(fresh), *libraries])
        fresh.replace(target)
    finally:
        for output in (*codes, fresh):
            output.unlink(missing_ok=True)


def _run_all(commands: Sequence[list[str]], progress: Callable[[int], None]) -> None:
    """Run each of the commands, on as many cores as there are; progress: takes how many have ended."""
    running: list[subprocess.Popen[str]] = []
    stopped = threading.Event()

    def started(process: subprocess.Popen[str]) -> None:
        running.append(process)
        # One that began while the others were ended.
        if stopped.is_set():
            process.kill()

    with ThreadPoolExecutor(min(len(commands), hardware.cores())) as pool:
        results = [pool.submit(_run, command, started) for command in commands]
        try:
            waiting = set(results)
            while waiting:
                progress(len(results) - len(waiting))
                waiting = wait(waiting, _PROGRESS_S, FIRST_COMPLETED).not_done
                for ended in set(results) - waiting:
                    ended.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for one in list(running):
                one.kill()
            raise


def _run(command: list[str], started: Callable[[subprocess.Popen[str]], None] = lambda process: None) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        started(process)
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)


def _key(compiler: str, flags: list[str], cpu: str, folder: Path) -> str:
    """A hash of everything that the compiled code depends on: sources, compiler and its flags, CPU, torch."""
    import torch

    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    sources = [path.read_text(encoding="utf-8") for path in sorted({*folder.iterdir(), *HEADERS.glob("*.h")})]
    parts = [*sources, version, *flags, cpu, torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cpu_flags() -> str:
    """The instruction sets of this CPU, as one line; empty where /proc/cpuinfo is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
