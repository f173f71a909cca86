"""What a server is started with: its backend folder, its environment, its command line, and free ports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import shapeshift
from shapeshift.errors import InvalidInputError, NotFoundError, UnsupportedError
from shapeshift.triton import keys, probe
from shapeshift.triton.settings import ServerSettings
from shapeshift.triton.unpack import STAMP

# Without one of these a server would be open to others or could not be controlled.
NEEDED = frozenset(
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

# A call from one model to another blocks one of these threads of the calling model until it is answered.
POOL_THREADS = 128


def compose_backends(place: Path, folders: Sequence[Path]) -> Path:
    """A folder at `place` with a link to each backend in `folders`, as the server takes one folder only.

    Raises NotFoundError for a folder that is missing, InvalidInputError for a backend that two folders hold.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(f"no backend folder {folder}; run `make setup`, or name another")
        for backend in sorted(folder.iterdir()):
            if not backend.is_dir() or backend.name.startswith((".", "__")):
                continue
            link = place / backend.name
            if link.is_symlink():
                raise InvalidInputError("backend", str(backend), f"{link.resolve()} has its name; rename one")
            link.symlink_to(backend.resolve())
    return place


def link_python_library(place: Path) -> Path:
    """A folder at `place` with the running Python's shared library, if it has one, for the stub to embed."""
    place.mkdir(parents=True, exist_ok=True)
    name = sysconfig.get_config_var("INSTSONAME")
    library = Path(str(sysconfig.get_config_var("LIBDIR")), str(name))
    link = place / str(name)
    link.unlink(missing_ok=True)
    if ".so" in library.name and library.is_file():
        link.symlink_to(library)
    return place


def require_matching_environment(triton: Path) -> None:
    """Raise UnsupportedError if the server at `triton` was unpacked for another Python, or numpy is too new for it.

    A server that was not unpacked by this project, such as a container's, is taken as it is.
    """
    try:
        unpacked = str(json.loads((triton / STAMP).read_text())["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if unpacked != running:
        raise UnsupportedError(f"{triton} is for Python {unpacked}, not {running}; run `make setup` again")
    with contextlib.suppress(PackageNotFoundError):
        numpy = version("numpy")
        # With numpy 2 this server's stub answers with tensors of no bytes, and without any error.
        if int(numpy.partition(".")[0]) >= 2:
            raise UnsupportedError(f"numpy {numpy} empties this server's answers; run `pip install 'numpy<2'`")


def require_models(settings: ServerSettings) -> None:
    """Raise NotFoundError for a repository that is missing or a model that no repository holds."""
    found: set[str] = set()
    for folder in settings.repositories:
        if not folder.is_dir():
            raise NotFoundError(f"no model repository at {folder}; run `make engines`, or name another")
        found |= {model.name for model in folder.iterdir() if model.is_dir()}
    for name in settings.models:
        if name not in found:
            raise NotFoundError(f"no model {name} in the repositories; they hold: {', '.join(sorted(found))}")


def environment(settings: ServerSettings) -> dict[str, str]:
    """This process's environment with the server's libraries, this Python and this package found first."""
    values = dict(os.environ)
    python_library = link_python_library(settings.run_directory.resolve() / "lib")
    for name, first in {
        "LD_LIBRARY_PATH": [settings.triton.resolve() / "lib", python_library],
        "PATH": [Path(sys.executable).parent],
        "PYTHONPATH": [Path(shapeshift.__file__).resolve().parents[1]],
    }.items():
        values[name] = os.pathsep.join([*map(str, first), *filter(None, [values.get(name)])])
    return values


def command(settings: ServerSettings, environment: Mapping[str, str], key: str, region_prefix: str) -> list[str]:
    """The server's command line, from the options that it knows.

    Raises UnsupportedError if it does not run, or lacks an option that safety or control depends on.
    """
    binary = settings.triton.resolve() / "bin" / "tritonserver"
    known = probe.options(binary, environment)
    missing = sorted(NEEDED - known)
    if missing:
        raise UnsupportedError(f"{binary} has no --{missing[0]}; use Triton 2.51 (24.10) or newer")
    backends = compose_backends(
        settings.run_directory.resolve() / "backends", [settings.triton / "backends", *settings.backend_directories]
    )
    restriction = f"{keys.RESTRICTED}:{keys.HTTP_HEADER}={key}"
    wanted = [
        *(("model-repository", str(folder.resolve())) for folder in settings.repositories),
        ("backend-directory", str(backends)),
        # The settings of `python` hold for every backend written in Python.
        ("backend-config", f"python,shm-region-prefix-name={region_prefix}"),
        ("backend-config", f"python,thread-pool-size={POOL_THREADS}"),
        ("model-control-mode", "explicit"),
        *(("load-model", name) for name in settings.models),
        ("http-address", settings.address),
        ("http-port", str(settings.http_port)),
        ("grpc-address", settings.address),
        ("grpc-port", str(settings.grpc_port)),
        ("metrics-address", settings.address),
        ("metrics-port", str(settings.metrics_port)),
        ("http-restricted-api", restriction),
        ("grpc-restricted-protocol", restriction),
        ("exit-timeout-secs", str(settings.exit_timeout_s)),
        ("allow-sagemaker", "false"),
        ("allow-vertex-ai", "false"),
    ]
    return [str(binary), *(f"--{name}={value}" for name, value in wanted if name in known)]


def require_free_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise InvalidInputError for the first of `ports` that something listens on."""
    for name, port in ports.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the server does: connections that are only waiting to expire do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise InvalidInputError(
                    f"{name}_port",
                    port,
                    f"{host}:{port} cannot be used ({error.strerror}): stop what uses it"
                    f" (`ss -ltnp 'sport = :{port}'` names it) or choose another with --{name}-port",
                ) from error
