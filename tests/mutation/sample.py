"""Single changes of the library's sources, by the operators of cosmic-ray, sampled with a seed."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast

from tests.mutation.meaning import Meaning, parses

PACKAGES = (
    *("adapter_cache", "cascade", "engines", "fused_decode", "polymorph"),
    *("serving", "sidecar", "token_adapt", "triton"),
)
# The operators whose changes a person makes by mistake: a condition negated, a bound moved by one, an operation turned
# round. Most others are no Python, mean the same (`== 0` and `<= 0` of a count), or fail in every call (`>>` of paths).
_COMPARED = "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE GtE_Lt Gt_LtE LtE_Gt"
_CALCULATED = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul LShift_RShift RShift_LShift BitAnd_BitOr"
_NUMBERS = "core/NumberReplacer"
_OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARED.split()),
    *(f"core/ReplaceBinaryOperator_{name}" for name in _CALCULATED.split()),
    *("core/ReplaceUnaryOperator_Delete_USub", "core/ReplaceUnaryOperator_Delete_Not", "core/AddNot"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ZeroIterationForLoop"),
    *("core/ExceptionReplacer", _NUMBERS),
)


@dataclass(frozen=True)
class Change:
    """One change of one line. file: relative to the project; occurrence: of the operator's positions in the file."""

    file: str
    line: int
    operator: str
    occurrence: int

    def apply(self, source: str) -> str:
        """The changed source."""
        changed = mutating.mutate_code(source, plugins.get_operator(self.operator)(), self.occurrence)
        assert changed is not None, self
        return str(changed)


def changes(file: str, source: str) -> Iterator[Change]:
    """Every change of `source` by these operators that means something, see `Meaning`."""
    meaning = Meaning(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in _OPERATORS:
        operator = plugins.get_operator(name)()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if not (meaning.is_silent(place) or (name == _NUMBERS and meaning.is_tuned(place))):
                yield Change(file, place[0], name, occurrence)


def changed_files(project: Path, since: str) -> list[str]:
    """The sources of PACKAGES that differ from the commit `since`; all of them where git does not know it."""
    folders = [f"shapeshift/{package}" for package in PACKAGES]
    command = ["git", "diff", "--name-only", "--diff-filter=d", since, "--", *folders]
    asked = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        found = [name for name in asked.stdout.splitlines() if name.endswith(".py")]
    else:
        found = [str(file.relative_to(project)) for folder in folders for file in (project / folder).rglob("*.py")]
    return sorted(name for name in found if (project / name).stat().st_size)


def sample(project: Path, files: Sequence[str], count: int, seed: int) -> list[Change]:
    """`count` changes: of each package as many as of the others, at most one of a line, and each kind as likely.

    The same ones for the same sources and seed.
    """
    rng = random.Random(seed)
    by_package: dict[str, list[str]] = {}
    for file in files:
        by_package.setdefault(package_of(file), []).append(file)
    chosen: list[Change] = []
    lines: set[tuple[str, int]] = set()
    packages = sorted(by_package)
    # A package with few lines may run out of them.
    for attempt in range(20 * count):
        if len(chosen) == count:
            break
        package = packages[attempt % len(packages)]
        file = rng.choice(by_package[package])
        by_kind: dict[str, list[Change]] = {}
        source = (project / file).read_text()
        for change in changes(file, source):
            if (file, change.line) not in lines:
                by_kind.setdefault(_kind(change), []).append(change)
        if by_kind and parses((change := rng.choice(by_kind[rng.choice(sorted(by_kind))])).apply(source)):
            lines.add((change.file, change.line))
            chosen.append(change)
    return chosen


def package_of(file: str) -> str:
    """The package of a source: `serving` for shapeshift/serving/metrics.py."""
    return file.split("/")[1]


def _kind(change: Change) -> str:
    return change.operator.split("_")[0]
