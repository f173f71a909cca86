"""The command line, the environment and the backend folder of a server, and checks before its start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shapeshift import installation
from shapeshift.errors import InvalidInputError, NotFoundError, UnsupportedError
from shapeshift.serving import events
from shapeshift.triton import keys
from shapeshift.triton.embedded.free_ports import why_taken
from shapeshift.triton.embedded.unpack import STAMP
from shapeshift.triton.endpoint import GRPC_URL
from shapeshift.triton.settings import ServerSettings

# Without one of these options the server would be open to others or could not be controlled.
REQUIRED_OPTIONS = frozenset(
    {
        "backend-config",
        "backend-directory",
        "grpc-address",
        "grpc-port",
        "grpc-restricted-protocol",
        "http-address",
        "http-port",
        "http-restricted-api",
        "load-model",
        "metrics-port",
        "model-control-mode",
        "model-repository",
    }
)

_OPTION = re.compile(r"^\s+--([a-z][a-z0-9-]*)", re.MULTILINE)
# Triton's time to end requests at a stop, seconds.
EXIT_TIMEOUT_S = 5
# Of which the first turns TLS on.
TLS_OPTIONS = ("grpc-use-ssl-mutual", "grpc-server-cert", "grpc-server-key", "grpc-root-cert")

# Configurations are complete as they are written; the switch has no value.
AS_WRITTEN = "disable-auto-complete-config"

# Each unanswered call from one model to another blocks one of these threads of the calling model.
POOL_THREADS = 128


def link_backends(target: Path, folders: Sequence[Path]) -> Path:
    """Fill the folder `target` with a link to each backend in `folders`, because the server accepts only one folder.

    Raises NotFoundError for a missing folder, InvalidInputError for a backend name that two folders have.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(f"no backend folder {folder}; run `shapeshift setup`, or give another")
        for backend in sorted(folder.iterdir()):
            if not backend.is_dir() or backend.name.startswith((".", "__")):
                continue
            link = target / backend.name
            if link.is_symlink():
                raise InvalidInputError("backend", str(backend), f"has the same name as {link.resolve()}; rename one")
            link.symlink_to(backend.resolve())
    return target


def plain_path(path: Path) -> Path:
    """`path` without links; where bash would not read it as one word, a link to it in the temporary folder.

    The server starts the process of a Python model by a line for bash that quotes nothing (24.10), and waits for ever
    where that fails. Raises UnsupportedError where there can be no such link.
    """
    path = path.resolve()
    if shlex.quote(str(path)) == str(path):
        return path
    # The name is the same for each start, so that one link stays behind and not many.
    name = f"shapeshift-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    link = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(OSError):
        link.symlink_to(path)
    # Another user may have made it, to lead the server elsewhere.
    is_ours = link.is_symlink() and link.lstat().st_uid == os.getuid() and link.readlink() == path
    if not is_ours or shlex.quote(str(link)) != str(link):
        raise UnsupportedError(
            f"{path} has characters that the server's command lines do not take, and there can be no link {link} to it;"
            " move the project to a path without spaces, or set TMPDIR to such a folder"
        )
    return link


def link_python_library(target: Path) -> Path:
    """Link this Python's shared library, if it has one, into the folder `target`: the stub embeds it."""
    target.mkdir(parents=True, exist_ok=True)
    name = sysconfig.get_config_var("INSTSONAME")
    library = Path(str(sysconfig.get_config_var("LIBDIR")), str(name))
    link = target / str(name)
    link.unlink(missing_ok=True)
    if ".so" in library.name and library.is_file():
        link.symlink_to(library)
    return target


def require_matching_environment(triton: Path) -> None:
    """Raise UnsupportedError if the server at `triton` was unpacked for another Python, or if numpy is too new for it.

    A server that this project did not unpack, such as that of a container, is not checked.
    """
    try:
        unpacked = str(json.loads((triton / STAMP).read_text())["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if unpacked != running:
        raise UnsupportedError(f"{triton} is for Python {unpacked}, not {running}; run `shapeshift setup` again")
    with contextlib.suppress(PackageNotFoundError):
        numpy = version("numpy")
        # With numpy 2 the stub of this server returns empty tensors, without any error.
        if int(numpy.partition(".")[0]) >= 2:
            raise UnsupportedError(f"with numpy {numpy} this server returns empty tensors; run `pip install 'numpy<2'`")


def parse_help(text: str) -> frozenset[str]:
    """The option names, without dashes, that a `tritonserver --help` lists."""
    return frozenset(_OPTION.findall(text))


def supported_options(binary: Path, environment: Mapping[str, str], timeout_s: float = 120.0) -> frozenset[str]:
    """The options of `binary`. Raises NotFoundError if it is missing, UnsupportedError if it does not run."""
    if not binary.is_file():
        raise NotFoundError(f"no server at {binary}; run `shapeshift setup`")
    try:
        answer = subprocess.run(
            [binary, "--help"],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"{binary} does not run here ({error}); run `shapeshift setup` again") from error
    options = parse_help(answer.stdout + answer.stderr)
    if not options:
        lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise UnsupportedError(f"{binary} does not run here ({lines[-1]}); it requires x86_64 and glibc 2.35")
    return options


def require_models(settings: ServerSettings) -> None:
    """Raise NotFoundError for a missing repository, or for a model that no repository has."""
    available: set[str] = set()
    for folder in settings.repositories:
        if not folder.is_dir():
            raise NotFoundError(f"no model repository at {folder}; run `shapeshift engines`, or give another")
        available |= {model.name for model in folder.iterdir() if model.is_dir()}
    for name in settings.models:
        if name not in available:
            raise NotFoundError(f"no model {name} in the repositories; they have: {', '.join(sorted(available))}")


def environment(settings: ServerSettings) -> dict[str, str]:
    """The environment of this process, in which the server's libraries, this Python and this package come first."""
    values = dict(os.environ)
    python_library = link_python_library(settings.run_directory.resolve() / "lib")
    for name, first in {
        "LD_LIBRARY_PATH": [settings.triton.resolve() / "lib", python_library],
        "PATH": [Path(sys.executable).parent],
        "PYTHONPATH": [installation.IMPORT_PATH],
    }.items():
        values[name] = os.pathsep.join([*map(str, first), *filter(None, [values.get(name)])])
    values[GRPC_URL] = settings.grpc_url
    values[events.VARIABLE] = str(settings.events)
    return values | settings.shared_variables


def command(settings: ServerSettings, environment: Mapping[str, str], key: str, region_prefix: str) -> list[str]:
    """The server's command line, with only those options that the server supports.

    Raises UnsupportedError if the server does not run, or lacks one of REQUIRED_OPTIONS; with `tls`, of TLS_OPTIONS;
    with `traces`, that for them.
    """
    binary = settings.triton.resolve() / "bin" / "tritonserver"
    supported = supported_options(binary, environment)
    secured = _tls_options(settings)
    traced = _trace_options(settings)
    missing = sorted({*REQUIRED_OPTIONS, *(name for name, _ in (*secured, *traced))} - supported)
    if missing:
        raise UnsupportedError(f"{binary} has no --{missing[0]}; use Triton 2.51 (24.10) or newer")
    backends = link_backends(
        settings.run_directory.resolve() / "backends", [settings.triton / "backends", *settings.backend_directories]
    )
    restriction = f"{keys.RESTRICTED}:{keys.HTTP_HEADER}={key}"
    values = [
        *(("model-repository", str(plain_path(folder))) for folder in settings.repositories),
        ("backend-directory", str(plain_path(backends))),
        # The settings of `python` apply to all backends written in Python.
        ("backend-config", f"python,shm-region-prefix-name={region_prefix}"),
        ("backend-config", f"python,thread-pool-size={POOL_THREADS}"),
        ("model-control-mode", "explicit"),
        *(("load-model", name) for name in settings.models),
        ("http-address", settings.address),
        ("http-port", str(settings.http_port)),
        ("grpc-address", settings.grpc_address),
        ("grpc-port", str(settings.grpc_port)),
        ("metrics-address", settings.address),
        ("metrics-port", str(settings.metrics_port)),
        ("http-restricted-api", restriction),
        ("grpc-restricted-protocol", restriction),
        ("exit-timeout-secs", str(EXIT_TIMEOUT_S)),
        ("allow-sagemaker", "false"),
        ("allow-vertex-ai", "false"),
        *secured,
        *traced,
    ]
    if settings.keep_going:
        # By default one model that fails to load ends the server, and leaves it not ready for ever where it does not.
        values += [("exit-on-error", "false"), ("strict-readiness", "false")]
    switches = [] if settings.complete_configs else [AS_WRITTEN]
    options = [f"--{name}={value}" for name, value in values if name in supported]
    return [str(binary), *options, *(f"--{name}" for name in switches if name in supported)]


def _tls_options(settings: ServerSettings) -> list[tuple[str, str]]:
    """The options for mutual TLS, none without. Raises as `Tls.require_files` does."""
    if settings.tls is None:
        return []
    settings.tls.require_files()
    files = (settings.tls.certificate, settings.tls.key, settings.tls.ca)
    return list(zip(TLS_OPTIONS, ("true", *(str(file.resolve()) for file in files)), strict=True))


def _trace_options(settings: ServerSettings) -> list[tuple[str, str]]:
    """The options for traces, none without."""
    if not settings.traces:
        return []
    where = ("mode=opentelemetry", f"opentelemetry,url={settings.traces}")
    return [("trace-config", one) for one in (*where, "level=TIMESTAMPS", f"rate={settings.trace_rate}")]


def require_free_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise InvalidInputError for the first of `ports` that is in use."""
    for name, port in ports.items():
        if reason := why_taken(host, port):
            raise InvalidInputError(
                f"{name}_port",
                port,
                f"{host}:{port} is not available ({reason}): stop the program that uses it"
                f" (`ss -ltnp 'sport = :{port}'` names it) or choose another with --{name}-port",
            )
