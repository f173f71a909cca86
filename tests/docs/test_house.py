"""docs/house.md held against the code: the modules, and who imports whom."""

from __future__ import annotations

import re

from docs_pages import PROJECT, code, table
from docs_sources import PACKAGES, imports, modules, package

HOUSE = PROJECT / "docs" / "house.md"
LISTED = ("shapeshift", "build_engines", "backends")
MODULES = {code(row[0]): row[1] for row in table(HOUSE, "Modules")}


def test_every_module_has_its_line() -> None:
    assert MODULES.keys() == modules(*LISTED).keys()


def test_who_imports_whom() -> None:
    documented = {code(row[0]): set(re.findall(r"`([^`]+)`", row[1])) for row in table(HOUSE, "Who imports whom")}
    found: dict[str, set[str]] = {}
    for module, path in modules(*LISTED).items():
        within = {package(name) for name in imports(path) if name.split(".")[0] in PACKAGES}
        found.setdefault(package(module), set()).update(within - {package(module)})
    assert found == documented
