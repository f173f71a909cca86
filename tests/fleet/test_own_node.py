"""The settings of a node's server, and its drain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet import certificates
from shapeshift.fleet.own_node import OwnNode
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import CA_VARIABLE
from shapeshift.triton.settings import ServerSettings

BASE = ServerSettings(repositories=(Path("repository"),))
PLAIN = 'name = "demo"\n[[nodes]]\nname = "a"\ngrpc = "{host}:18001"\nmetrics = "{page}"\nkey_file = "a.key"\n'
TLS = '[tls]\nca = "tls/ca.pem"\ncertificate = "tls/{node}.pem"\nkey = "tls/{node}.key"\n'


def write(folder: Path, host: str = "127.0.0.1", page: str = "http://127.0.0.1:18002/metrics", more: str = "") -> Path:
    file = folder / "fleet.toml"
    file.write_text(PLAIN.format(host=host, page=page) + more)
    return file


def test_without_tls_the_page_is_the_servers_own(tmp_path: Path) -> None:
    found = OwnNode(write(tmp_path), "a").server_settings(BASE)
    assert (found.grpc_url, found.metrics_url) == ("127.0.0.1:18001", "http://127.0.0.1:18002/metrics")
    assert found.key_file == tmp_path / "a.key"
    assert found.shared_variables == {"SHAPESHIFT_FLEET": str(tmp_path / "fleet.toml"), "SHAPESHIFT_NODE": "a"}


def test_with_tls_http_and_metrics_stay_on_loopback(tmp_path: Path) -> None:
    certificates.ensure(tmp_path / "tls", "a")
    file = write(tmp_path, "10.1.2.3", "https://10.1.2.3:18003/metrics", TLS)
    found = OwnNode(file, "a").server_settings(BASE)
    assert (found.grpc_address, found.address, found.is_public) == ("10.1.2.3", "127.0.0.1", False)
    assert found.metrics_url == BASE.metrics_url
    assert found.shared_variables[CA_VARIABLE] == str(tmp_path / "tls" / "ca.pem")


def test_a_node_of_an_ipv6_host_keeps_its_brackets(tmp_path: Path) -> None:
    certificates.ensure(tmp_path / "tls", "a")
    file = write(tmp_path, "[fd00::7]", "https://[fd00::7]:18003/metrics", TLS)
    found = OwnNode(file, "a").server_settings(BASE)
    assert (found.grpc_url, found.address, found.is_public) == ("[fd00::7]:18001", "127.0.0.1", False)
    local = OwnNode(write(tmp_path, "[::1]"), "a").server_settings(BASE)
    assert (local.grpc_url, local.is_public) == ("[::1]:18001", False)
    with pytest.raises(InvalidInputError, match="grpc_host"):
        OwnNode(write(tmp_path, "[fd00::7]"), "a").server_settings(BASE)
    with pytest.raises(ShapeshiftError, match="an address of IPv6 in brackets"):
        OwnNode(write(tmp_path, "fd00::7"), "a")


def test_an_open_address_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="grpc_host"):
        OwnNode(write(tmp_path, "10.1.2.3"), "a").server_settings(BASE)
    with pytest.raises(InvalidInputError, match=r"other machines need \[tls\]"):
        OwnNode(write(tmp_path, page="http://10.1.2.3:1/metrics"), "a").server_settings(BASE)
    with pytest.raises(InvalidInputError, match="else http://"):
        OwnNode(write(tmp_path, page="https://127.0.0.1:1/metrics"), "a").server_settings(BASE)


def test_a_missing_certificate_and_an_unknown_host_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, page="https://127.0.0.1:1/metrics", more=TLS)
    with pytest.raises(NotFoundError, match=r"tls ca: no file .*ca\.pem"):
        OwnNode(file, "a").server_settings(BASE)
    with pytest.raises(InvalidInputError, match="grpc: got 'no-such-host.invalid:18001'"):
        OwnNode(write(tmp_path, "no-such-host.invalid"), "a").server_settings(BASE)


def test_a_node_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no node aa; did you mean a. it has a"):
        OwnNode(write(tmp_path), "aa")


def test_the_two_options_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "repository").mkdir()
    given = ["serve", "--build", str(tmp_path), "--models", "encode"]
    assert main([*given, "--node", "a"]) == 2
    assert "--fleet FILE and --node NAME go together" in capsys.readouterr().err
    assert main([*given, "--fleet", str(tmp_path / "no.toml"), "--node", "a"]) == 2
    assert "no fleet file at" in capsys.readouterr().err


@contextmanager
def pages(show: Callable[[int], str]) -> Iterator[tuple[str, list[str]]]:
    """The URL of a metrics page that shows `show(number)` at each look, from 0, and the looks."""
    looks: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  http.server's name
            text = show(len(looks))
            looks.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics", looks
        server.shutdown()


def counts(running: float, waiting: float = 0.0) -> str:
    values = {"shapeshift_requests_running": running, "shapeshift_requests_waiting": waiting}
    return "".join(f'{name}{{model="encode"}} {value}\n' for name, value in values.items())


def test_a_drain_ends_when_nothing_has_been_in_flight_for_three_pages(tmp_path: Path) -> None:
    shown = [counts(2), counts(0), counts(0, 1), counts(0), counts(0), counts(0)]
    said: list[str] = []
    with pages(shown.__getitem__) as (page, looks):
        OwnNode(write(tmp_path), "a", scrape_s=0.0).drain(page, said.append)
    assert said == [] and len(looks) == 6


def test_a_drain_does_not_wait_for_requests_of_a_process_that_has_ended(tmp_path: Path) -> None:
    """Triton goes on to show the gauges of a process, with the last values."""

    def show(number: int) -> str:
        processes = {7: (40, 5), 8: (number, 1 if number < 10 else 0)}
        return "".join(
            f'{metrics.HEARTBEAT}{{model="encode",pid="{pid}"}} {beats}\n'
            f'shapeshift_requests_running{{model="encode",pid="{pid}"}} {running}\n'
            for pid, (beats, running) in processes.items()
        )

    said: list[str] = []
    with pages(show) as (page, looks):
        OwnNode(write(tmp_path), "a", scrape_s=0.0).drain(page, said.append)
    assert said == [] and len(looks) == 13


def test_a_drain_ends_after_its_time_and_where_the_server_has_gone(tmp_path: Path) -> None:
    said: list[str] = []
    with pages(lambda number: counts(2)) as (page, _):
        OwnNode(write(tmp_path), "a", 0.05, scrape_s=0.01).drain(page, said.append)
    assert said == ["2 requests are still in flight after 0.05 s\n"]
    OwnNode(write(tmp_path), "a").drain(page, said.append)
    assert len(said) == 1
