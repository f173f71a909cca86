from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, UnsupportedError
from shapeshift.serving import events
from shapeshift.triton.embedded import command_line
from shapeshift.triton.embedded.unpack import STAMP
from shapeshift.triton.settings import ServerSettings

SUPPORTED = frozenset(command_line.REQUIRED_OPTIONS | {"metrics-address", "exit-timeout-secs"})


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    for folder in ("a/encode", "b", "triton/backends/python", "triton/bin"):
        (tmp_path / folder).mkdir(parents=True)
    return ServerSettings(
        repositories=(tmp_path / "a", tmp_path / "b"),
        models=("encode", "encode_w00"),
        triton=tmp_path / "triton",
        run_directory=tmp_path / "run",
    )


def add_binary(settings: ServerSettings, options: frozenset[str]) -> None:
    """A program that only lists these options."""
    binary = settings.triton / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\ncat <<END\n" + "".join(f"  --{name} <x>\n" for name in options) + "END\n")
    binary.chmod(0o755)


def build_command(settings: ServerSettings, options: frozenset[str]) -> list[str]:
    add_binary(settings, options)
    return command_line.command(settings, os.environ, key="k" * 32, region_prefix="mine_")


def test_command_binds_every_port_and_restricts_control(settings: ServerSettings) -> None:
    command = build_command(settings, SUPPORTED)
    for name, port in settings.ports.items():
        assert f"--{name}-address=127.0.0.1" in command
        assert f"--{name}-port={port}" in command
    restriction = f"model-repository,shared-memory,trace,logging:shapeshift-key={'k' * 32}"
    assert f"--http-restricted-api={restriction}" in command
    assert f"--grpc-restricted-protocol={restriction}" in command
    assert [option for option in command if option.startswith("--load-model")] == [
        "--load-model=encode",
        "--load-model=encode_w00",
    ]
    assert "--model-control-mode=explicit" in command
    assert "--backend-config=python,shm-region-prefix-name=mine_" in command


def test_a_server_that_goes_on_serves_although_a_model_does_not_load(settings: ServerSettings) -> None:
    options = SUPPORTED | {"exit-on-error", "strict-readiness"}
    lenient = {"--exit-on-error=false", "--strict-readiness=false"}
    assert not lenient & {*build_command(settings, options)}
    assert lenient <= {*build_command(replace(settings, keep_going=True), options)}


@pytest.mark.parametrize("name", ["a b", "it's", "a;b", "$(x)", "a\nb"])
def test_paths_that_bash_would_not_take_are_linked(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server's line for a Python model quotes nothing."""
    plain, odd = tmp_path / "tmp", tmp_path / name
    monkeypatch.setattr(tempfile, "tempdir", str(plain))
    plain.mkdir()
    (odd / "repository" / "encode").mkdir(parents=True)
    (tmp_path / "a" / "encode").rmdir()
    assert command_line.plain_path(tmp_path / "a") == tmp_path / "a"
    settings = replace(settings, repositories=(odd / "repository",), run_directory=odd / "run")
    for _ in range(2):
        options = dict(option.partition("=")[::2] for option in build_command(settings, SUPPORTED)[1:])
        for option, leads_to in (("model-repository", "repository"), ("backend-directory", "run/backends")):
            path = Path(options[f"--{option}"])
            assert path.resolve() == odd / leads_to and shlex.quote(str(path)) == str(path)
    assert len([*plain.iterdir()]) == 2
    for link in plain.iterdir():
        link.unlink()
        link.symlink_to(tmp_path)
    with pytest.raises(UnsupportedError, match="move the project to a path without spaces"):
        build_command(settings, SUPPORTED)


def test_traces_go_where_the_settings_say(settings: ServerSettings) -> None:
    url = "http://localhost:4318/v1/traces"
    traced, options = replace(settings, traces=url, trace_rate=50), SUPPORTED | {"trace-config"}
    assert [option for option in build_command(traced, options) if option.startswith("--trace")] == [
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={url}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=50",
    ]
    names = {events.TRACES_VARIABLE: url, events.TRACE_RATE_VARIABLE: "50"}
    assert names.items() <= command_line.environment(traced).items()
    assert not any(option.startswith("--trace") for option in build_command(settings, options))
    assert not names.keys() & command_line.environment(settings).keys()
    with pytest.raises(UnsupportedError, match="no --trace-config"):
        build_command(traced, SUPPORTED)


def test_unsupported_options_are_omitted(settings: ServerSettings) -> None:
    assert not any("sagemaker" in option for option in build_command(settings, SUPPORTED))
    assert "--allow-sagemaker=false" in build_command(settings, SUPPORTED | {"allow-sagemaker"})


def test_configurations_stay_as_written_where_they_are_complete(settings: ServerSettings) -> None:
    option = f"--{command_line.AS_WRITTEN}"
    complete = replace(settings, complete_configs=False)
    assert option in build_command(complete, SUPPORTED | {command_line.AS_WRITTEN})
    assert option not in build_command(complete, SUPPORTED), "a server that lacks it completes nothing that is complete"
    assert option not in build_command(settings, SUPPORTED | {command_line.AS_WRITTEN})


def test_unknown_models_are_named(settings: ServerSettings) -> None:
    with pytest.raises(NotFoundError, match="no model encode_w00 in the repositories; they have: encode"):
        command_line.require_models(settings)


@pytest.mark.parametrize("option", ["http-restricted-api", "grpc-restricted-protocol", "http-address"])
def test_a_server_without_a_safety_option_is_refused(option: str, settings: ServerSettings) -> None:
    with pytest.raises(UnsupportedError, match=f"no --{option}"):
        build_command(settings, SUPPORTED - {option})


def test_backends_of_several_folders_are_linked_into_one(tmp_path: Path) -> None:
    for name in ("first/python", "first/__pycache__", "second/polymorph"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "second" / "README").touch()
    place = tmp_path / "run" / "backends"
    (place / "stale").mkdir(parents=True)
    command_line.link_backends(place, [tmp_path / "first", tmp_path / "second"])
    assert {link.name: link.resolve() for link in place.iterdir()} == {
        "python": tmp_path / "first" / "python",
        "polymorph": tmp_path / "second" / "polymorph",
    }


def test_two_backends_with_the_same_name_are_refused(tmp_path: Path) -> None:
    for name in ("first/python", "second/python"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InvalidInputError, match=r"has the same name as .*; rename one"):
        command_line.link_backends(tmp_path / "run", [tmp_path / "first", tmp_path / "second"])
    with pytest.raises(NotFoundError, match="absent"):
        command_line.link_backends(tmp_path / "run", [tmp_path / "absent"])


def test_environment_puts_this_python_first(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    values = command_line.environment(settings)
    libraries = values["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries == [str(tmp_path / "triton" / "lib"), str(tmp_path / "run" / "lib"), "/elsewhere"]
    assert values["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import shapeshift.triton.embedded.guard"], env=values, cwd=tmp_path, check=False
    )
    assert found.returncode == 0


def test_numpy_2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed = tmp_path / "numpy-2.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    command_line.require_matching_environment(tmp_path)
    (tmp_path / STAMP).write_text(f'{{"python": "{sys.version_info.major}.{sys.version_info.minor}"}}')
    with pytest.raises(UnsupportedError, match="numpy 2.1.0"):
        command_line.require_matching_environment(tmp_path)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    command_line.require_matching_environment(tmp_path)


def test_a_port_in_use_is_named_and_a_free_one_passes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=rf"grpc_port: got {port};.*--grpc-port"):
            command_line.require_free_ports("127.0.0.1", {"grpc": port})
    command_line.require_free_ports("127.0.0.1", {"grpc": port})


def test_probe_refuses_other_programs(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="shapeshift setup"):
        command_line.supported_options(tmp_path / "tritonserver", os.environ)
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho 'libcudart.so: cannot open shared object file' >&2\nexit 127\n")
    with pytest.raises(UnsupportedError, match="shapeshift setup"):
        command_line.supported_options(binary, os.environ)
    binary.chmod(0o755)
    with pytest.raises(UnsupportedError, match="cannot open shared object file"):
        command_line.supported_options(binary, os.environ)
