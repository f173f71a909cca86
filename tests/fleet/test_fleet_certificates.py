"""Certificates of a fleet, and the metrics page that only their holders read."""

from __future__ import annotations

import asyncio
import contextlib
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

import numpy as np
import pytest
from cryptography import x509

from shapeshift import files
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet import certificates
from shapeshift.fleet.metrics_proxy import CERTIFICATE_EXPIRY, MetricsProxy
from shapeshift.triton import metrics
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded.free_ports import free_ports, why_taken
from shapeshift.triton.endpoint import KEY_VARIABLE, Endpoint, Tls, bracketed, tls_from_environment
from tests.fleet.fake_node import FakeNode


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


def pass_on(page: str, host: str, tls: Tls) -> Iterator[str]:
    """The URL at this address at which the page is passed on; also what stands for gRPC."""
    port = next(free_ports())
    with MetricsProxy(host, port, page, Endpoint(f"{bracketed(host)}:{port}"), tls):
        yield f"https://{bracketed(host)}:{port}/metrics"


@pytest.fixture(scope="module")
def secured(ours: Tls, page: str) -> Iterator[str]:
    yield from pass_on(page, "127.0.0.1", ours)


@pytest.fixture
def secured_by_ipv6(ours: Tls, page: str) -> Iterator[str]:
    if why_taken("::1", 0):
        pytest.skip("no IPv6 here")
    yield from pass_on(page, "::1", ours)


def test_files_are_made_once_and_private(tmp_path: Path) -> None:
    first = certificates.ensure(tmp_path / "tls", "a")
    texts = {file.name: file.read_bytes() for file in (tmp_path / "tls").iterdir()}
    certificates.ensure(tmp_path / "tls", "b")
    assert certificates.ensure(tmp_path / "tls", "a") == first
    for name, text in texts.items():
        assert (tmp_path / "tls" / name).read_bytes() == text
    for file in (tmp_path / "tls").glob("*.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def end_of(tls: Tls) -> datetime.datetime:
    return x509.load_pem_x509_certificate(tls.certificate.read_bytes()).not_valid_after_utc


# Valid since a day before it was made: 3 of 5 days, and 2 of 3, are left.
@pytest.mark.parametrize(("days", "is_renewed"), [(4, False), (2, False), (0.4, True)])
def test_a_certificate_is_renewed_in_the_last_third_of_its_time(tmp_path: Path, days: float, is_renewed: bool) -> None:
    tls = certificates.ensure(tmp_path, "a", days=days)
    before, authority = end_of(tls), tls.ca.read_bytes()
    assert certificates.ensure(tmp_path, "a") == tls
    assert (end_of(tls) > before) == is_renewed
    assert tls.ca.read_bytes() == authority, "nodes that run trust the new one"


def test_a_certificate_for_another_machine_is_made_anew(tmp_path: Path) -> None:
    first = certificates.ensure(tmp_path, "a", ["10.0.0.1", "other"]).certificate.read_bytes()
    assert certificates.ensure(tmp_path, "a", ["other"]).certificate.read_bytes() == first
    assert certificates.ensure(tmp_path, "a", ["10.0.0.2"]).certificate.read_bytes() != first


def test_a_damaged_certificate_is_made_anew(tmp_path: Path) -> None:
    file = certificates.ensure(tmp_path, "a").certificate
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    certificates.ensure(tmp_path, "a")
    assert file.read_bytes().endswith(b"-----END CERTIFICATE-----\n")


def test_without_the_key_of_the_authority_nothing_is_renewed_and_nobody_added(tmp_path: Path) -> None:
    tls = certificates.ensure(tmp_path, "a", days=0.4)
    before = tls.certificate.read_bytes()
    (tmp_path / "ca.key").unlink()
    assert certificates.ensure(tmp_path, "a").certificate.read_bytes() == before
    with pytest.raises(ShapeshiftError, match="ca.key, which signs certificates"):
        certificates.ensure(tmp_path, "b")


def copy(source: Tls, target: Tls) -> None:
    """Replace the files of `target`, as a renewal does."""
    for old, new in ((target.ca, source.ca), (target.key, source.key), (target.certificate, source.certificate)):
        files.replace_private(old, new.read_bytes())


def test_connections_that_are_open_take_new_files(ours: Tls, stranger: Tls, tmp_path: Path, page: str) -> None:
    """Another authority stands for a certificate that has expired meanwhile: with the old files nobody connects."""
    tls = Tls(*(tmp_path / name for name in ("ca.pem", "a.pem", "a.key")))
    copy(ours, tls)
    port, proxy_port = islice(free_ports(), 2)
    url = f"https://127.0.0.1:{proxy_port}/metrics"

    async def infer(client: AsyncClient) -> int:
        call = ModelCall("m", {"x": np.ones(1, np.int32)}, timeout_s=20.0)
        return int((await client.infer(call))["y"][0])

    async def across_a_renewal() -> list[int]:
        client, answers = AsyncClient(f"127.0.0.1:{port}", tls), []
        for issuer in (ours, stranger):
            copy(issuer, tls)
            node = FakeNode({"m"}, lambda _, inputs: {"y": inputs["x"]}, port, issuer)
            try:
                answers.append(await infer(client))
                await asyncio.to_thread(control.version)
                assert metrics.scrape(url, tls=issuer)
            finally:
                await asyncio.to_thread(node.close)
        await client.close()
        return answers

    with (
        ModelControl(f"127.0.0.1:{port}", tls=tls) as control,
        MetricsProxy("127.0.0.1", proxy_port, page, Endpoint(f"127.0.0.1:{port}"), tls),
    ):
        assert asyncio.run(across_a_renewal()) == [1, 1]


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
    assert metrics.scrape(secured, tls=ours)["up", frozenset()] == 1.0
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


def test_many_clients_that_say_nothing_hold_up_nobody(secured: str, ours: Tls) -> None:
    port = int(secured.rpartition(":")[2].partition("/")[0])
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert metrics.scrape(secured, tls=ours)


def test_the_page_says_when_the_certificate_of_the_server_ends(secured: str, ours: Tls) -> None:
    """The server at the address of gRPC is the page's own here: it shows the same certificate."""
    ends = x509.load_pem_x509_certificate(ours.certificate.read_bytes()).not_valid_after_utc
    assert metrics.scrape(secured, tls=ours)[CERTIFICATE_EXPIRY, frozenset()] == ends.timestamp()


def test_a_host_of_ipv6_passes_its_page_on(secured_by_ipv6: str, ours: Tls, stranger: Tls) -> None:
    samples = metrics.scrape(secured_by_ipv6, tls=ours)
    assert samples["up", frozenset()] == 1.0 and (CERTIFICATE_EXPIRY, frozenset()) in samples
    with pytest.raises(ShapeshiftError, match="CERTIFICATE_VERIFY_FAILED"):
        metrics.scrape(secured_by_ipv6, tls=stranger)


def test_a_page_that_is_away_is_said(ours: Tls) -> None:
    port, nobody = islice(free_ports(), 2)
    grpc = Endpoint(f"127.0.0.1:{nobody}")
    with MetricsProxy("127.0.0.1", port, f"http://127.0.0.1:{nobody}/metrics", grpc, ours):
        with pytest.raises(ShapeshiftError, match="status 503"):
            metrics.scrape(f"https://127.0.0.1:{port}/metrics", tls=ours)
        with pytest.raises(InvalidInputError, match="the address is not available"):
            MetricsProxy("127.0.0.1", port, "", grpc, ours)


def test_clocks_of_nodes_may_differ_by_minutes(ours: Tls) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for file in (ours.ca, ours.certificate):
        found = x509.load_pem_x509_certificate(file.read_bytes())
        assert found.not_valid_before_utc < now - datetime.timedelta(hours=1), "a clock that is behind accepts it"
