"""Single changes of the library's sources, by the operators of cosmic-ray, sampled with a seed."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast

PACKAGES = (
    *("adapter_cache", "cascade", "engines", "fused_decode", "polymorph"),
    *("serving", "sidecar", "token_adapt", "triton"),
)
# What changes behaviour nowhere (types are not evaluated, `is` beside ==), what every import notices, and operators
# that need settings.
_LEFT_OUT = re.compile(r"BitOr|BitXor|_Is|_UAdd|_Invert|RemoveDecorator|VariableReplacer|VariableInserter")
# A number that a person tunes, as `_POLL_S = 0.1`: another value is not wrong.
_TUNED = re.compile(r"^_?[A-Z][A-Z0-9_, ]*(: [\w\[\]]+)? = [\d._*e+-]+")
_NUMBERS = "core/NumberReplacer"


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
    """Every change of `source` that these operators know, but those of tuned numbers."""
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    for name in plugins.operator_names():
        if _LEFT_OUT.search(name):
            continue
        operator = plugins.get_operator(name)()
        positions = [start[0] for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, line in enumerate(positions):
            if not (name == _NUMBERS and _TUNED.match(lines[line - 1])):
                yield Change(file, line, name, occurrence)


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
        for change in changes(file, (project / file).read_text()):
            if (file, change.line) not in lines:
                by_kind.setdefault(_kind(change), []).append(change)
        if by_kind:
            change = rng.choice(by_kind[rng.choice(sorted(by_kind))])
            lines.add((change.file, change.line))
            chosen.append(change)
    return chosen


def package_of(file: str) -> str:
    """The package of a source: `serving` for shapeshift/serving/metrics.py."""
    return file.split("/")[1]


def _kind(change: Change) -> str:
    return change.operator.split("_")[0]
