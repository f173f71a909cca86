"""Certificates of a fleet, and the metrics page that only their holders read."""

from __future__ import annotations

import datetime
import http.server
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from cryptography import x509

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet import certificates
from shapeshift.fleet.metrics_proxy import MetricsProxy
from shapeshift.triton import metrics
from shapeshift.triton.embedded.free_ports import free_ports
from shapeshift.triton.endpoint import KEY_VARIABLE, Tls, tls_from_environment


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates.ensure(tmp_path_factory.mktemp("tls"), "a", ["10.0.0.1"])


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Files of another authority."""
    return certificates.ensure(tmp_path_factory.mktemp("other"), "a")


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The URL of a metrics page on loopback."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"up 1\n")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


@pytest.fixture(scope="module")
def secured(ours: Tls, page: str) -> Iterator[str]:
    """The URL at which the page is passed on."""
    port = next(free_ports())
    with MetricsProxy("127.0.0.1", port, page, ours):
        yield f"https://127.0.0.1:{port}/metrics"


def test_files_are_made_once_and_private(tmp_path: Path) -> None:
    first = certificates.ensure(tmp_path / "tls", "a")
    texts = {file.name: file.read_bytes() for file in (tmp_path / "tls").iterdir()}
    certificates.ensure(tmp_path / "tls", "b")
    assert certificates.ensure(tmp_path / "tls", "a") == first
    for name, text in texts.items():
        assert (tmp_path / "tls" / name).read_bytes() == text
    for file in (tmp_path / "tls").glob("*.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_bad_name_of_a_node_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="node"):
        certificates.ensure(tmp_path / "tls", "../a")
    assert not (tmp_path / "tls").exists()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    found = certificates.ensure(tmp_path, "a")
    found.key.chmod(0o640)
    with pytest.raises(ShapeshiftError, match="chmod 600"):
        found.client_options()
    found.key.unlink()
    with pytest.raises(NotFoundError, match="tls key: no file"):
        found.client_context()


def test_the_environment_names_all_files_or_none(ours: Tls) -> None:
    values = ours.variables
    assert tls_from_environment(values) == ours
    assert tls_from_environment({}) is None
    del values[KEY_VARIABLE]
    with pytest.raises(InvalidInputError, match=KEY_VARIABLE):
        tls_from_environment(values)


def test_holders_of_a_certificate_read_the_page(secured: str, ours: Tls) -> None:
    assert metrics.scrape(secured, tls=ours) == {("up", frozenset()): 1.0}
    with pytest.raises(ShapeshiftError, match="status 404"):
        metrics.scrape(secured.replace("/metrics", "/other"), tls=ours)


def test_others_do_not(secured: str, ours: Tls, stranger: Tls) -> None:
    with pytest.raises(InvalidInputError, match="needs certificates"):
        metrics.scrape(secured)
    with pytest.raises(ShapeshiftError, match="CERTIFICATE_VERIFY_FAILED"):
        metrics.scrape(secured, tls=stranger)
    # It trusts our authority, and shows a certificate of another one.
    with pytest.raises(ShapeshiftError, match="no metrics"):
        metrics.scrape(secured, tls=replace(stranger, ca=ours.ca))
    context = ssl.create_default_context(cafile=ours.ca)
    port = int(secured.rpartition(":")[2].partition("/")[0])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        pytest.raises(OSError),
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        connection.recv(1)


def test_a_client_that_says_nothing_holds_up_nobody(secured: str, ours: Tls) -> None:
    port = int(secured.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)):
        assert metrics.scrape(secured, tls=ours)


def test_a_page_that_is_away_is_said(ours: Tls) -> None:
    port, nobody = islice(free_ports(), 2)
    with MetricsProxy("127.0.0.1", port, f"http://127.0.0.1:{nobody}/metrics", ours):
        with pytest.raises(ShapeshiftError, match="status 503"):
            metrics.scrape(f"https://127.0.0.1:{port}/metrics", tls=ours)
        with pytest.raises(InvalidInputError, match="the address is not available"):
            MetricsProxy("127.0.0.1", port, "", ours)


def test_clocks_of_nodes_may_differ_by_minutes(ours: Tls) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for file in (ours.ca, ours.certificate):
        found = x509.load_pem_x509_certificate(file.read_bytes())
        assert found.not_valid_before_utc < now - datetime.timedelta(hours=1), "a clock that is behind accepts it"
