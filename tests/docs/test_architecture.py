"""docs/architecture.md held against the code: the packages, and who imports whom."""

from __future__ import annotations

import re

from tests.docs.docs_pages import PROJECT, code, prose, table
from tests.docs.docs_sources import PACKAGES, imports, modules

PAGE = PROJECT / "docs" / "architecture.md"
LISTED = ("shapeshift", "build_engines", "backends")
ROOT = "shapeshift"


def package(name: str) -> str:
    """The package of a dotted name: `shapeshift.x`, or `shapeshift` for a module at its top, or the top folder."""
    parts = name.split(".")
    if parts[0] == ROOT and len(parts) > 1 and (PROJECT / ROOT / parts[1]).is_dir():
        return f"{ROOT}.{parts[1]}"
    return parts[0]


def test_packages_and_their_imports() -> None:
    documented = {code(row[0]): set(re.findall(r"`([^`]+)`", row[2])) for row in table(PAGE, "Packages")}
    found: dict[str, set[str]] = {}
    for module, path in modules(*LISTED).items():
        within = {package(name) for name in imports(path) if name.split(".")[0] in PACKAGES}
        found.setdefault(package(module), set()).update(within - {package(module)})
    assert documented == found


def test_modules_that_the_page_names_exist() -> None:
    known = set(modules("shapeshift"))
    packages = {name.rpartition(".")[0] for name in known}
    ends = known | packages
    named = {name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", prose(PAGE)) if not name.endswith(".pbtxt")}
    missing = {name for name in named if not any(f".{end}".endswith(f".{name}") for end in ends)}
    assert not missing
