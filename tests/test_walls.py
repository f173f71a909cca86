"""The walls between packages: who may import what, read from the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shapeshift.cli.policy import TECHNIQUES as POLICY_TABLES
from tests.sources import closure, imports, source_of

PROJECT = Path(__file__).resolve().parents[1]

TECHNIQUES = ("polymorph", "token_adapt", "fused_decode", "adapter_cache", "cascade")
MAY_BUILD_ON = {("adapter_cache", "fused_decode"), ("adapter_cache", "polymorph")}

GATEWAY_MAY_IMPORT = {"gateway", "serving", "triton", "errors", "loops", "settings"}

LIVE_MAY_IMPORT = {"live", "serving", "sidecar", "triton"}

# What the fleet extends; its command line, `fleet/cli`, extends `cli` too.
FLEET_MAY_IMPORT = {"fleet", "engines", "polymorph", "serving", "sidecar", "triton"}
# Who reaches the fleet, by a module's name: a front's peers, the sidecar's nodes, a router's transports, commands.
FLEET_HOOKS = {
    "shapeshift/serving/front.py",
    "shapeshift/sidecar/servers.py",
    "shapeshift/polymorph/router/placement.py",
    "shapeshift/cli/main.py",
    "shapeshift/cli/serve.py",
}

POLICY_IMPORTS = {"numpy", "scipy", "numba"}
# An optional library, imported where it is used: file and package.
OPTIONAL = {("shapeshift/polymorph/policy/baselines/allocate_gurobi.py", "gurobipy")}

HEAVY = (
    "torch",
    "transformers",
    "openvino",
    "onnxruntime",
    "tensorrt",
    "tritonclient",
    "grpc",
    "gurobipy",
    "huggingface_hub",
)


def reached(files: list[Path], root: Path) -> set[Path]:
    """`files`, and all files of the project that they import, directly or not."""
    return {found for file in files for found in closure(file, root)}


def sources(root: Path) -> list[Path]:
    """All sources of the project; not what is generated or installed."""
    tops = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith((".", "_"))]
    return [file for top in tops if top.name not in ("build", "venv") for file in sorted(top.rglob("*.py"))]


def name_of(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def policy_files(root: Path) -> list[Path]:
    """The files of every folder `policy`, at any depth below it."""
    return sorted((root / "shapeshift").glob("*/policy/**/*.py"))


def impure_policies(root: Path, tables: tuple[str, ...] = ()) -> list[str]:
    """Wall 1: policy files, and all that they reach, import the standard library and numerics alone."""
    tabled = [file for table in tables if (file := source_of(table, root)) is not None]
    found = []
    for file in sorted(reached([*policy_files(root), *tabled], root)):
        for module, line in imports(file, root):
            top = module.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top in POLICY_IMPORTS or top == "shapeshift"
            if not allowed and (name_of(file, root), top) not in OPTIONAL:
                found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def misplaced_triton(root: Path) -> list[str]:
    """Wall 2: Triton's backend module belongs to backends, its client to shapeshift/triton and the tools."""
    found = []
    for file in sources(root):
        name = name_of(file, root)
        is_backend = name.startswith("backends/") or (name.startswith(("tests/", "bench/")) and "/backends/" in name)
        is_library = name.startswith(("shapeshift/", "backends/")) and not name.startswith("shapeshift/triton/")
        for module, line in imports(file, root):
            top = module.partition(".")[0]
            wrong = (top == "triton_python_backend_utils" and not is_backend) or (top == "tritonclient" and is_library)
            if wrong:
                found.append(f"{name}:{line} imports {module}")
    return found


def entangled_techniques(root: Path) -> list[str]:
    """Wall 3: techniques do not import one another."""
    found = []
    for technique in TECHNIQUES:
        for file in sorted((root / "shapeshift" / technique).rglob("*.py")):
            for module, line in imports(file, root):
                other = module.removeprefix("shapeshift.").partition(".")[0]
                foreign = module.startswith("shapeshift.") and other in TECHNIQUES and other != technique
                if foreign and (technique, other) not in MAY_BUILD_ON:
                    found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def gateway_leaks(root: Path) -> list[str]:
    """Wall 4: the gateway knows no technique's inside, and only the command line knows the gateway."""
    found = []
    for file in sorted((root / "shapeshift").rglob("*.py")):
        own = file.relative_to(root / "shapeshift").parts[0]
        for module, line in imports(file, root):
            part = module.removeprefix("shapeshift.").partition(".")[0]
            if module == "shapeshift" or not module.startswith("shapeshift."):
                continue
            wrong = part not in GATEWAY_MAY_IMPORT if own == "gateway" else part == "gateway" and own != "cli"
            if wrong:
                found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def fleet_leaks(root: Path) -> list[str]:
    """Wall 5: the core imports nothing of the fleet, which imports no more of it than what it extends."""
    found = []
    for file in sorted((root / "shapeshift").rglob("*.py")):
        inside = file.is_relative_to(root / "shapeshift" / "fleet")
        allowed = FLEET_MAY_IMPORT | ({"cli"} if "shapeshift/fleet/cli/" in name_of(file, root) else set())
        for module, line in imports(file, root):
            part = module.removeprefix("shapeshift.").partition(".")[0]
            is_package = (root / "shapeshift" / part).is_dir() and module.startswith("shapeshift.")
            if is_package and (part not in allowed if inside else part == "fleet"):
                found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def live_leaks(root: Path) -> list[str]:
    """Wall 7: only the command line imports the live page, which imports no technique's inside."""
    found = []
    for file in sorted((root / "shapeshift").rglob("*.py")):
        own = file.relative_to(root / "shapeshift").parts[0]
        for module, line in imports(file, root):
            part = module.removeprefix("shapeshift.").partition(".")[0]
            is_package = (root / "shapeshift" / part).is_dir() and module.startswith("shapeshift.")
            if is_package and (part not in LIVE_MAY_IMPORT if own == "live" else part == "live" and own != "cli"):
                found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def fleet_hooks(root: Path) -> set[str]:
    """The sources outside the fleet that hold the name of one of its modules as a text."""
    files = {name_of(file, root): file for file in (root / "shapeshift").rglob("*.py")}
    outside = {name: file for name, file in files.items() if not name.startswith("shapeshift/fleet/")}
    return {name for name, file in outside.items() if '"shapeshift.fleet.' in file.read_text(encoding="utf-8")}


def heavy_packages(root: Path) -> list[str]:
    """Importing a package of the library costs nothing: its __init__ imports the standard library alone."""
    found = []
    for file in sorted((root / "shapeshift").rglob("__init__.py")):
        for module, line in imports(file, root):
            if module.partition(".")[0] not in sys.stdlib_module_names:
                found.append(f"{name_of(file, root)}:{line} imports {module}")
    return found


def test_policies_are_pure() -> None:
    files = {name_of(file, PROJECT) for file in policy_files(PROJECT)}
    assert {name.split("/")[1] for name in files} == {*TECHNIQUES, "engines", "fleet", "sidecar"}
    assert {"shapeshift/polymorph/policy/bins.py", "shapeshift/polymorph/policy/baselines/binpacking.py"} <= files
    assert all(source_of(table, PROJECT) for table in POLICY_TABLES)
    assert impure_policies(PROJECT, POLICY_TABLES) == []


def test_triton_is_met_where_it_belongs() -> None:
    files = {name_of(file, PROJECT) for file in sources(PROJECT)}
    assert {"backends/polymorph/model.py", "shapeshift/triton/control.py", "tests/test_walls.py"} <= files
    assert misplaced_triton(PROJECT) == []


def test_techniques_are_apart() -> None:
    assert (PROJECT / "shapeshift" / "polymorph").is_dir()
    assert entangled_techniques(PROJECT) == []


def test_the_gateway_is_apart() -> None:
    assert (PROJECT / "shapeshift" / "gateway").is_dir()
    assert gateway_leaks(PROJECT) == []


def test_the_fleet_is_apart() -> None:
    assert (PROJECT / "shapeshift" / "fleet").is_dir()
    assert fleet_leaks(PROJECT) == []
    assert fleet_hooks(PROJECT) == FLEET_HOOKS


def test_the_live_page_is_apart() -> None:
    assert (PROJECT / "shapeshift" / "live").is_dir()
    assert live_leaks(PROJECT) == []


def test_packages_are_light() -> None:
    assert heavy_packages(PROJECT) == []


# That the walls stop what they should.


@pytest.fixture
def broken_project(tmp_path: Path) -> Path:
    """A project of the same layout in which each wall is broken once, and kept elsewhere."""
    written = {
        "shapeshift/__init__.py": "import json",
        "shapeshift/errors.py": "",
        "shapeshift/polymorph/__init__.py": "from shapeshift.polymorph import front",
        "shapeshift/polymorph/policy/bins.py": "import numpy as np\nimport math\nfrom shapeshift import helper",
        "shapeshift/polymorph/policy/dispatch.py": "def f():\n    import tritonclient.grpc",
        "shapeshift/polymorph/front.py": "import torch\nfrom shapeshift.engines import manifest",
        "shapeshift/helper.py": "from .errors import X\nfrom . import deep",
        "shapeshift/deep.py": "from torch import nn",
        "shapeshift/table.py": "import openvino",
        "shapeshift/cascade/__init__.py": "",
        "shapeshift/cascade/front.py": "from shapeshift import polymorph\nfrom ..polymorph import front",
        "shapeshift/adapter_cache/loop.py": "from shapeshift.fused_decode import engine\nimport shapeshift.cascade",
        "shapeshift/serving/sender.py": "import triton_python_backend_utils as pb_utils",
        "shapeshift/triton/control.py": "import tritonclient.http",
        "shapeshift/gateway/app.py": "from shapeshift.triton import control\nfrom shapeshift.cascade import front",
        "shapeshift/fleet/node.py": "from shapeshift.triton import control\nfrom shapeshift.cascade import front",
        "shapeshift/fleet/cli/main.py": "from shapeshift.cli import gateway\nfrom shapeshift.simulate import scenario",
        "shapeshift/sidecar/observe.py": "from shapeshift.fleet.node import x",
        "shapeshift/live/app.py": "from shapeshift.sidecar import observe\nfrom shapeshift.cascade import front",
        "shapeshift/triton/page.py": "from shapeshift.live import app",
        "shapeshift/cli/live.py": "from shapeshift.live import app",
        "shapeshift/simulate/__init__.py": "",
        "shapeshift/sidecar/hook.py": 'f("shapeshift.fleet.node")',
        "shapeshift/serving/times.py": "from shapeshift.gateway import app",
        "shapeshift/cli/gateway.py": "from shapeshift.gateway import app",
        "backends/x/model.py": "import triton_python_backend_utils\nfrom tritonclient import utils",
        "client/x.py": "import tritonclient.grpc",
        "tests/triton/backends/y/model.py": "import triton_python_backend_utils",
        "bench/peers/backends/plain.py": "import triton_python_backend_utils",
        "tests/test_x.py": "import tritonclient.grpc\nimport triton_python_backend_utils",
        "build/peers/z.py": "import triton_python_backend_utils",
    }
    for name, text in written.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_walls_stop_what_they_should(broken_project: Path) -> None:
    assert impure_policies(broken_project, ("shapeshift.table",)) == [
        "shapeshift/deep.py:1 imports torch",
        "shapeshift/polymorph/policy/dispatch.py:2 imports tritonclient.grpc",
        "shapeshift/table.py:1 imports openvino",
    ]
    assert misplaced_triton(broken_project) == [
        "backends/x/model.py:2 imports tritonclient",
        "shapeshift/polymorph/policy/dispatch.py:2 imports tritonclient.grpc",
        "shapeshift/serving/sender.py:1 imports triton_python_backend_utils",
        "tests/test_x.py:2 imports triton_python_backend_utils",
    ]
    assert entangled_techniques(broken_project) == [
        "shapeshift/adapter_cache/loop.py:2 imports shapeshift.cascade",
        "shapeshift/cascade/front.py:1 imports shapeshift.polymorph",
        "shapeshift/cascade/front.py:2 imports shapeshift.polymorph",
        "shapeshift/cascade/front.py:2 imports shapeshift.polymorph.front",
    ]
    assert gateway_leaks(broken_project) == [
        "shapeshift/gateway/app.py:2 imports shapeshift.cascade",
        "shapeshift/gateway/app.py:2 imports shapeshift.cascade.front",
        "shapeshift/serving/times.py:1 imports shapeshift.gateway",
        "shapeshift/serving/times.py:1 imports shapeshift.gateway.app",
    ]
    assert fleet_leaks(broken_project) == [
        "shapeshift/fleet/cli/main.py:2 imports shapeshift.simulate",
        "shapeshift/fleet/node.py:2 imports shapeshift.cascade",
        "shapeshift/fleet/node.py:2 imports shapeshift.cascade.front",
        "shapeshift/sidecar/observe.py:1 imports shapeshift.fleet.node",
    ]
    assert live_leaks(broken_project) == [
        "shapeshift/live/app.py:2 imports shapeshift.cascade",
        "shapeshift/live/app.py:2 imports shapeshift.cascade.front",
        "shapeshift/triton/page.py:1 imports shapeshift.live",
        "shapeshift/triton/page.py:1 imports shapeshift.live.app",
    ]
    assert fleet_hooks(broken_project) == {"shapeshift/sidecar/hook.py"}
    assert heavy_packages(broken_project) == [
        "shapeshift/polymorph/__init__.py:1 imports shapeshift.polymorph",
        "shapeshift/polymorph/__init__.py:1 imports shapeshift.polymorph.front",
    ]


# What is really loaded.


def loaded_by(*modules: str) -> set[str]:
    """Which of HEAVY a new process holds after importing the modules and naming every policy."""
    script = (
        f"import sys, importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"if 'shapeshift.cli.main' in {modules!r}: sys.modules['shapeshift.cli.main'].main(['policy', '--list'])\n"
        f"sys.stderr.write(' '.join(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PROJECT)
    return set(done.stderr.split())


def test_the_command_line_and_the_policies_load_nothing_heavy() -> None:
    modules = [name_of(file, PROJECT).removesuffix(".py").replace("/", ".") for file in policy_files(PROJECT)]
    assert loaded_by("shapeshift.cli.main", *modules) == set()


def test_a_serving_process_loads_no_model_library() -> None:
    assert loaded_by("shapeshift.polymorph.front", "shapeshift.token_adapt.front") == set()
    assert loaded_by("shapeshift.fused_decode.unary") == {"tritonclient", "grpc"}


def test_no_serving_process_loads_the_library_of_the_hub() -> None:
    """Ids are resolved by the build; serving downloads nothing."""
    found = loaded_by("shapeshift.adapter_cache.front", "shapeshift.cascade.front")
    assert "torch" in found and "huggingface_hub" not in found
    for technique in TECHNIQUES:
        reached_files = {
            name_of(file, PROJECT) for file in closure(PROJECT / "backends" / technique / "model.py", PROJECT)
        }
        assert [name for name in reached_files if name.startswith("shapeshift/build_engines/")] == []


def test_a_build_with_nothing_to_do_loads_no_model_library() -> None:
    assert not loaded_by("shapeshift.cli.engines") & {"torch", "transformers", "openvino", "onnxruntime"}


def test_heavy_libraries_would_be_seen() -> None:
    assert "grpc" in loaded_by("shapeshift.triton.control")
