"""The sampler of changes, on a small project; and, among the long tests, the share of changes that the tests notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import native, notice
from tests.mutation.notice import Copy, FailsUnchangedError
from tests.mutation.sample import Change, changed_files, changes, sample

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""

_POLL_S = 0.1


def wait_s(wait_ms: float | None) -> float:
    """In seconds."""
    return wait_ms / 1000 if wait_ms is not None else 0.0


def is_late(seconds: float) -> bool:
    return seconds > 2.5
'''
TEST = """from shapeshift.serving.waits import wait_s


def test_seconds() -> None:
    assert wait_s(250) == 0.25
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one source of one package, and a test that reaches one of its two functions."""
    root = tmp_path / "project"
    written = {
        "shapeshift/__init__.py": "",
        "shapeshift/serving/__init__.py": "",
        "shapeshift/serving/waits.py": SOURCE,
        "tests/serving/test_waits.py": TEST,
        "pyproject.toml": f"[tool.pytest.ini_options]\nmarkers = {['server', 'slow', 'long']}\npythonpath = ['.']\n",
    }
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "build").mkdir()
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def test_changes_are_of_behaviour() -> None:
    found = list(changes("a.py", SOURCE))
    # Neither the number that is tuned nor the type of an argument.
    assert {change.line for change in found} == {8, 12}
    assert {
        "core/ReplaceBinaryOperator_Div_Mul",
        "core/ReplaceComparisonOperator_Gt_GtE",
        "core/NumberReplacer",
    } <= {change.operator for change in found}
    assert all(change.apply(SOURCE) != SOURCE for change in found)


@pytest.mark.parametrize(
    "line",
    [
        "PERIODS_MS = (1, 2, 5)",
        "def wait(limit_s: float = 5.0) -> None: ...",
        "class Settings:\n    limit_s: float = 5.0",
        'raise ValueError(f"{limit / 1000} is too long" if late else "late")',
        'self._log(f"{1 + len(late)} are late")',
        "assert held == 0",
        "Thread(target=run, daemon=True)",
        "json.dumps(found, indent=1, ensure_ascii=False)",
        "pairs = zip(names, values, strict=True)",
        "target.copy_(source, non_blocking=True)",
        "@dataclass(frozen=True)\nclass Settings: ...",
        "class Clock(Protocol):\n    def now(self, /) -> int | float: ...",
    ],
)
def test_what_means_nothing_is_not_changed(line: str) -> None:
    assert list(changes("a.py", line + "\n")) == []


@pytest.mark.parametrize(
    "line",
    [
        "wait(limit_s=5.0)",
        "raise Late if late and not held else Early",
        "log = held == 0",
        "pairs = zip(names, values, strict=False)",
        "target.copy_(source, non_blocking=False)",
        "export(module, strict=True)",
    ],
)
def test_what_stands_near_it_is_changed(line: str) -> None:
    assert list(changes("a.py", line + "\n"))


def test_the_sample_comes_from_the_seed_and_takes_a_line_once(project: Path) -> None:
    files = changed_files(project, "no-such-commit")
    assert files == ["shapeshift/serving/waits.py"]
    found = sample(project, files, 10, 1)
    assert found == sample(project, files, 10, 1)
    assert sorted(change.line for change in found) == [8, 12]
    assert {change for seed in range(9) for change in sample(project, files, 1, seed)} > {found[0]}


def test_what_no_test_reaches_is_missed_and_the_sources_stay(project: Path, tmp_path: Path) -> None:
    copy = Copy(project, tmp_path / "copy")
    (tmp_path / "copy").mkdir(exist_ok=True)
    unit, late = (
        Change("shapeshift/serving/waits.py", 8, "core/ReplaceBinaryOperator_Div_Mul", 0),
        Change("shapeshift/serving/waits.py", 12, "core/ReplaceComparisonOperator_Gt_GtE", 0),
    )
    found = copy.judge(unit)
    assert found.test == "tests/serving/test_waits.py::test_seconds"
    assert found.line.startswith("return wait_ms / 1000") and "* 1000" in found.line
    assert copy.judge(late).test == ""
    assert (project / "shapeshift/serving/waits.py").read_text() == SOURCE
    assert (tmp_path / "copy/shapeshift/serving/waits.py").read_text() == SOURCE


def test_a_test_that_fails_without_a_change_is_an_error(project: Path, tmp_path: Path) -> None:
    (project / "tests/serving/test_waits.py").write_text(TEST.replace("0.25", "0.5"))
    copy = Copy(project, tmp_path / "copy")
    with pytest.raises(FailsUnchangedError, match="test_seconds fails"):
        copy.judge(Change("shapeshift/serving/waits.py", 12, "core/ReplaceComparisonOperator_Gt_GtE", 0))


def test_tests_that_do_not_end_without_a_change_say_nothing_of_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine."""
    monkeypatch.setattr(notice, "_LIMIT_S", 0.0)
    copy = Copy(project, tmp_path / "copy")
    with pytest.raises(FailsUnchangedError, match="^the tests did not end without a change$"):
        copy.judge(Change("shapeshift/serving/waits.py", 8, "core/ReplaceBinaryOperator_Div_Mul", 0))


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("if (at < end && more) {", ["if (at <= end && more) {", "if (at < end || more) {"]),
        ("for (; i + kLanes <= inputs; i += kLanes) {", ["for (; i + kLanes - 1 <= inputs; i += kLanes) {"]),
        ("auto most = std::min<int64_t>(a, b);", ["auto most = std::max<int64_t>(a, b);"]),
        ("target[at * width] = 7;", ["target[at / width] = 7;", "target[at * width] = 8;"]),
    ],
)
def test_kernels_are_changed_at_bounds_and_tails(line: str, changed: list[str]) -> None:
    found = list(native.changes("a.h", f"{line}\n"))
    made = [one.apply(f"{line}\n").rstrip() for one in found]
    assert [one for one in made if one in changed] == changed and line not in made


@pytest.mark.parametrize(
    "line",
    [
        "constexpr int64_t kRows = 4;",
        "// a < b",
        '#include "a.h"',
        'TORCH_CHECK(inside, "1 < 2");',
        "std::vector<Task> a;",
    ],
)
def test_what_no_test_of_kernels_can_see_is_not_changed(line: str) -> None:
    assert list(native.changes("a.h", line)) == []


def test_every_kernel_has_tests_and_the_sample_comes_from_the_seed() -> None:
    files = native.files(PROJECT)
    assert len(files) > 20
    assert all((PROJECT / test).is_file() for file in files for test in native.tests_of(file))
    some = native.files(PROJECT, ["low_rank", "terms"])
    assert [Path(file).name for file in some] == ["low_rank.h", "terms.h"]
    found = native.sample(PROJECT, some, 30, 1)
    assert found == native.sample(PROJECT, some, 30, 1) != native.sample(PROJECT, some, 30, 2)
    assert len({(one.file, one.line) for one in found}) == len(found) == 30
    assert {one.kind for one in found} == {"comparison", "end", "logic", "number", "operation", "tail"}


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("options", [(), ("--kernels", "all", "--count", "25")], ids=["python", "kernels"])
def test_nine_of_ten_changes_are_noticed(options: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutation", *options], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
