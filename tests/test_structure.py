"""The shape of the code: small folders, no import circles, and requests that touch few files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.sources import closure, import_graph, strongly_connected

PROJECT = Path(__file__).resolve().parents[1]
MOST_MODULES = 15
# Files, `__init__.py` not counted, that a request with default settings can reach: all that the backend imports, inside
# functions too, and the modules that the defaults choose by name (`shapeshift.settings.Choices`).
MOST_FILES = {"polymorph": 31, "token_adapt": 35, "fused_decode": 51, "adapter_cache": 68, "cascade": 35}
CHOSEN = {
    "polymorph": ("polymorph.front", "engines.providers.openvino"),
    "token_adapt": ("token_adapt.policy.plan_grid",),
    "fused_decode": ("fused_decode.front", "fused_decode.model.cpu_runtime"),
    "adapter_cache": (
        *("adapter_cache.front", "fused_decode.model.cpu_runtime"),
        *("adapter_cache.policy.admission", "adapter_cache.policy.eviction", "adapter_cache.lora.native"),
    ),
    "cascade": (),
}


@pytest.mark.parametrize("top", ["shapeshift", "bench"])
def test_folders_stay_small(top: str) -> None:
    modules = [file for file in (PROJECT / top).rglob("*.py") if file.name != "__init__.py"]
    found = Counter(file.parent for file in modules)
    assert {str(folder): count for folder, count in found.items() if count > MOST_MODULES} == {}


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph(PROJECT, "shapeshift", "bench", "build_engines", "backends", "client")
    assert len(graph) > 300
    assert strongly_connected(graph) == []


@pytest.mark.parametrize("technique", MOST_FILES)
def test_a_request_touches_few_files(technique: str) -> None:
    starts = [PROJECT / "backends" / technique / "model.py"]
    starts += [PROJECT / "shapeshift" / f"{name.replace('.', '/')}.py" for name in CHOSEN[technique]]
    reached = {file for start in starts for file in closure(start, PROJECT) if file.name != "__init__.py"}
    names = sorted(str(file.relative_to(PROJECT)) for file in reached)
    assert len(reached) <= MOST_FILES[technique], names


def test_packages_hold_no_code() -> None:
    """An `__init__.py` with code would run at every import of a module beside it."""
    found = [file for file in (PROJECT / "shapeshift").rglob("__init__.py") if file.stat().st_size]
    assert found == [PROJECT / "shapeshift" / "__init__.py"], "which holds the version"


# That the checks find what they look for.


def test_circles_are_found(tmp_path: Path) -> None:
    written = {
        "p/__init__.py": "",
        "p/a.py": "from p import b",
        "p/b.py": "def f():\n    from p.c import X",
        "p/c.py": "import p.a\nX = 1",
        "p/d.py": "from p.a import x",
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path, "p")
    assert strongly_connected(graph) == [["p/a.py", "p/b.py", "p/c.py"]]
    assert {file.name for file in closure(tmp_path / "p" / "d.py", tmp_path)} == {
        "__init__.py",
        *["a.py", "b.py", "c.py", "d.py"],
    }
