"""docs/house.md held against the code: the modules, who imports whom, and the three walls."""

from __future__ import annotations

import re
import sys

from docs_pages import PROJECT, code, table
from docs_sources import PACKAGES, imports, modules, package

HOUSE = PROJECT / "docs" / "house.md"
LISTED = ("shapeshift", "build_engines", "backends")
MODULES = {code(row[0]): row[1] for row in table(HOUSE, "Modules")}
POLICY_MAY_IMPORT = {*sys.stdlib_module_names, "numpy", "scipy", "numba"}
TECHNIQUES = {path.name for path in (PROJECT / "backends").iterdir() if path.is_dir() and path.name != "__pycache__"}


def test_every_module_has_its_line() -> None:
    assert MODULES.keys() == modules(*LISTED).keys()


def test_who_imports_whom() -> None:
    documented = {code(row[0]): set(re.findall(r"`([^`]+)`", row[1])) for row in table(HOUSE, "Who imports whom")}
    found: dict[str, set[str]] = {}
    for module, path in modules(*LISTED).items():
        within = {package(name) for name in imports(path) if name.split(".")[0] in PACKAGES}
        found.setdefault(package(module), set()).update(within - {package(module)})
    assert found == documented


def test_policy_files_import_nothing_heavy() -> None:
    policies = {name for name, line in MODULES.items() if line.startswith("policy:")}
    assert policies
    for module in policies:
        tops = {name.split(".")[0] for name in imports(modules(*LISTED)[module])}
        assert tops <= POLICY_MAY_IMPORT, f"{module}: {tops - POLICY_MAY_IMPORT}"


def test_triton_stays_behind_its_wall() -> None:
    for module, path in modules(*PACKAGES).items():
        tops = {name.split(".")[0] for name in imports(path)}
        assert "triton_python_backend_utils" not in tops or module.startswith("backends."), module
        if module.startswith("shapeshift."):
            assert "tritonclient" not in tops or module.startswith("shapeshift.triton."), module


def test_techniques_do_not_import_one_another() -> None:
    assert TECHNIQUES
    rooms = {f"shapeshift.{name}" for name in TECHNIQUES}
    for module, path in modules("shapeshift").items():
        # adapter_cache builds on the loop of fused_decode; nothing else crosses.
        if package(module) in rooms:
            others = {package(name) for name in imports(path)} & rooms - {package(module)}
            assert others <= {"shapeshift.fused_decode"} and (not others or "adapter_cache" in module), module
