"""Whether the tests of the mirrored folder notice a change, in a copy of the working tree."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutation import native
from tests.mutation.native import NativeChange
from tests.mutation.sample import Change, package_of
from tests.sources import closure

_LIMIT_S, _COMPILER_S = 300.0, 1800.0
_SELECTED = "not server and not slow and not long"
_ENDLESS = "the tests did not end"
_POLL_S = 0.05
_KERNELS = "kernels"
# What the tests import that takes seconds.
_IMPORTED = ("numpy", "scipy.optimize", "torch", "transformers", "tokenizers", "hypothesis", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Verdict:
    """test: the first one that failed with the change and passes without it; empty where none did.

    line: as it was, and as it was changed to.
    """

    change: Change | NativeChange
    test: str
    line: str
    seconds: float


class NotCompiledError(Exception):
    """The compiler refuses the changed source."""


class FailsUnchangedError(Exception):
    """A test fails, or the tests do not end, without a change, too: what they say of the change is not known."""


class Copy:
    """A copy of a project's sources in `folder`.

    Its build folder is that of the project, which tests only read, but for the compiled kernels, which they write.
    """

    def __init__(self, project: Path, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=project, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (project / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(project / name, folder / name)
        for made in (project / "build").iterdir():
            if made.name != _KERNELS:
                (folder / "build").mkdir(exist_ok=True)
                (folder / "build" / made.name).symlink_to(made)
        self._passing: set[str] = set()
        for name in _IMPORTED:
            importlib.import_module(name)

    def judge(self, change: Change | NativeChange) -> Verdict:
        """Run the tests with the change, and the first that failed without it; all of them, where they did not end.

        Raises FailsUnchangedError where that fails or they do not end, too, as on a busy machine, NotCompiledError for
        a change of a kernel that the compiler refuses.
        """
        file = self._folder / change.file
        before = file.read_text()
        after = change.apply(before)
        began = time.monotonic()
        plugins = [native.PLUGIN] if isinstance(change, NativeChange) else []
        try:
            file.write_text(after)
            if isinstance(change, NativeChange) and not self._compiles(change.file):
                raise NotCompiledError(str(change))
            tests = self._tests(change)
            failed = self._first_failure(tests, _LIMIT_S, plugins)
        finally:
            file.write_text(before)
        if failed and failed not in self._passing:
            if again := self._first_failure(tests if failed == _ENDLESS else [failed], _LIMIT_S, plugins):
                raise FailsUnchangedError(f"{again}{'' if again == _ENDLESS else ' fails'} without a change")
            if failed != _ENDLESS:
                self._passing.add(failed)
        return Verdict(change, failed, _difference(before, after), time.monotonic() - began)

    def _first_failure(self, tests: Sequence[str], limit_s: float, plugins: Sequence[str]) -> str:
        """Which test failed first, or _ENDLESS; empty where all passed."""
        if not tests:
            return ""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE", "-m", _SELECTED, *tests]
        arguments += [part for plugin in plugins for part in ("-p", plugin)]
        output = self._folder / "tests.log"
        status = self._run(lambda: int(importlib.import_module("pytest").main(arguments)), output, limit_s)
        if status is None:
            return _ENDLESS
        lines = [line for line in output.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        # A name of a test may hold spaces; " - " and the message follow it.
        named = [line.partition(" ")[2].partition(" - ")[0] for line in lines]
        # 5: no test was selected.
        return "" if status in (0, 5) else (named or tests)[0]

    def _compiles(self, file: str) -> bool:
        """Whether the kernel of this file can be compiled; if so it has been, for the tests."""
        run = partial(native.compile_kernel, file, self._folder / "build" / _KERNELS)
        status = self._run(run, self._folder / "compiler.log", _COMPILER_S)
        if status is None:
            raise RuntimeError(f"the compiler did not end within {_COMPILER_S:g} s")
        return status == 0

    def _run(self, run: Callable[[], int], output: Path, limit_s: float) -> int | None:
        """What `run` returns with the sources of the copy, in a process that is only for this; None: it did not end."""

        def run_in_copy() -> int:
            for name in [name for name in sys.modules if name.split(".")[0] in ("shapeshift", "tests")]:
                del sys.modules[name]
            sys.path.insert(0, str(self._folder))
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONPATH=str(self._folder), PYTHONDONTWRITEBYTECODE="1")
            os.chdir(self._folder)
            return run()

        return _in_a_child(run_in_copy, output, limit_s)

    def _tests(self, change: Change | NativeChange) -> Sequence[str]:
        """The files of tests that compute with a kernel; for Python those of the mirrored folder that reach the file.

        Those that are named like it come first, then those that name it: they fail soonest. By imports, also of the
        folder's conftest.py, or by name. Policies are found by the names that requests give them, which no import
        shows: all files.
        """
        if isinstance(change, NativeChange):
            return native.tests_of(change.file)
        target, package = self._folder / change.file, package_of(change.file)
        folder = self._folder / "tests" / package
        shared = folder / "conftest.py"
        by_fixtures = shared.exists() and target in closure(shared, self._folder)
        names = {file: target.stem in file.read_text() for file in sorted(folder.rglob("test_*.py"))}
        shown = "/policy/" not in change.file and not by_fixtures
        reaching = [file for file in names if names[file] or target in closure(file, self._folder)] if shown else []
        reaching = reaching or list(names)
        reaching.sort(key=lambda file: (target.stem not in file.stem, not names[file]))
        return [str(file.relative_to(self._folder)) for file in reaching]


def _difference(before: str, after: str) -> str:
    """The first line that differs, as it was and as it is."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((f"{one.strip()} -> {other.strip()}" for one, other in pairs if one != other), "a line is gone")


def _in_a_child(run: Callable[[], int], output: Path, limit_s: float) -> int | None:
    """What `run` returns in a forked process, which has all that this one has imported; None where it does not end."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            sys.stdout = sys.stderr = output.open("w")
            for stream in (1, 2):
                os.dup2(sys.stdout.fileno(), stream)
            status = run()
            sys.stdout.flush()
            os._exit(status)
        except BaseException:  # noqa: BLE001  a copy of the parent must not go on as the parent
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + limit_s
    ended = (0, 0)
    while not ended[0] and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        # It may not have begun a group of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(ended[1])
