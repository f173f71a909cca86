"""compose.cpu.yaml, started: the server and the gateway as containers that are restarted in turn, under load.

Needs Docker with docker-compose, and the image `shapeshift` (`make image`); Prometheus where it is installed, whose
program stands in for its image, and Chromium. SHAPESHIFT_REQUESTS: how many are sent.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from docker.image import NAME
from tests import waiting
from tests.docs.docs_pages import PROJECT
from tests.live import chromium

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.timeout(3600)]
REQUESTS = int(os.environ.get("SHAPESHIFT_REQUESTS", "20000"))
CLIENTS = 8
PROMETHEUS = "shapeshift-test-prometheus"
# A killed process never answers what it held: the client asks again.
TIMEOUT_S, PATIENCE_S = 20.0, 300.0
LIMITS = {"mem_limit": "2g", "memswap_limit": "2g", "cpus": 1.0}
TEXTS = [f"a text of {number} words" + " more" * number for number in range(16)]


@dataclass
class Compose:
    """The services, in a copy of the project. ports: on this machine, by those inside."""

    folder: Path
    ports: dict[int, int]
    key: str

    def __call__(self, *arguments: str, check: bool = True) -> str:
        command = ["docker-compose", "--file=docker/compose.cpu.yaml", "--file=docker/limits.yaml"]
        command += ["--project-name", f"shapeshift-{os.getpid()}", "--profile=gateway", *arguments]
        environment = {**os.environ, "MODELS": "encode", "PROMETHEUS": PROMETHEUS}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def ask(self, client: http.client.HTTPConnection, text: str) -> list[float]:
        """The embedding of a text. Raises OSError or HTTPException where nobody, or no model, answers."""
        if client.port == self.ports[8080]:
            body: object = {"model": "encode", "input": text}
            path, headers = "/v1/embeddings", {"Authorization": f"Bearer {self.key}"}
        else:
            body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]}
            path, headers = "/v2/models/encode/infer", {}
        client.request("POST", path, json.dumps(body), {**headers, "Content-Type": "application/json"})
        response = client.getresponse()
        content = response.read()
        if response.status != 200:
            raise http.client.HTTPException(response.status, content[:200])
        answer = json.loads(content)
        vector: list[float] = answer["data"][0]["embedding"] if "data" in answer else answer["outputs"][0]["data"]
        return vector


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> Iterator[Compose]:
    if shutil.which("docker-compose") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker with docker-compose runs here")
    if subprocess.run(["docker", "image", "inspect", NAME], capture_output=True, check=False).returncode:
        pytest.skip("no image: `make image`")
    folder = tmp_path_factory.mktemp("compose")
    for name in (
        "model_repository",
        "checkpoints",
        *(f"build/{one}" for one in ("repository", "engines", "checkpoints")),
    ):
        shutil.copytree(PROJECT / name, folder / name, symlinks=True, copy_function=os.link)
    made = subprocess.run(
        [PROJECT / ".venv/bin/shapeshift", "gateway", "--api-keys=build/gateway_keys", "--new-key=test"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    # The user of the image, 1000, writes the run folder and reads its secret.
    (folder / "build" / "gateway_keys").chmod(0o600)
    for path in [
        folder / "build",
        *(one for one in (folder / "build").rglob("*") if one.is_dir() or one.name == "gateway_keys"),
    ]:
        os.chown(path, 1000, 1000)
    ports = dict(zip((8000, 8001, 8002, 8080, 8090, 9090), free_ports(6), strict=True))
    text = (PROJECT / "docker" / "compose.cpu.yaml").read_text()
    # Those of the server are the same inside, where the live page reads them.
    serves = [f"--{name}-port={ports[port]}" for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002))]
    text = text.replace("[serve,", f"[serve, {', '.join(serves)},").replace("[live]", f"[live, --port={ports[8090]}]")
    text = text.replace("127.0.0.1:8080:", f"127.0.0.1:{ports[8080]}:").replace(":9090", f":{ports[9090]}")
    for port in (8000, 8001, 8002):
        text = text.replace(f":{port}:{port}", f":{ports[port]}:{ports[port]}")
        text = text.replace(f"triton:{port}", f"triton:{ports[port]}")
    shutil.copytree(PROJECT / "docker" / "observability", folder / "docker" / "observability")
    (folder / "docker" / "compose.cpu.yaml").write_text(text)
    limits = {"services": {"triton": LIMITS, "gateway": LIMITS}}
    (folder / "docker" / "limits.yaml").write_text(yaml.safe_dump(limits))
    services = Compose(folder, ports, made.stdout.split()[-1])
    # As the comment in it says.
    scraped = folder / "docker" / "observability" / "prometheus.yml"
    text = scraped.read_text().replace("# authorization:", "authorization:")
    for inside, outside in ports.items():
        text = text.replace(f"localhost:{inside}", f"localhost:{outside}")
    scraped.write_text(text)
    (scraped.parent / "gateway.key").write_text(services.key)
    try:
        services("up", "--detach")
        yield services
    finally:
        services("down", "--volumes", "--timeout", "30", check=False)


class Load:
    """Clients that send texts to the server and to the gateway, and send again what was not answered."""

    def __init__(self, compose: Compose, number: int, right: list[list[float]]) -> None:
        self._compose = compose
        self._left = iter(range(number))
        self._right = right
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def await_answers(self, number: int) -> None:
        waiting.wait_for(
            lambda: self.counts["right"] + self.counts["wrong"] + self.counts["lost"] >= number, 3000.0, 0.2
        )

    def _run(self, client: int) -> None:
        port = self._compose.ports[8080 if client % 2 else 8000]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        while True:
            with self._lock:
                number = next(self._left, None)
            if number is None:
                return
            outcome = self._send(connection, number % len(TEXTS))
            with self._lock:
                self.counts[outcome] += 1

    def _send(self, connection: http.client.HTTPConnection, text: int) -> str:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                vector = self._compose.ask(connection, TEXTS[text])
            except (OSError, http.client.HTTPException):
                connection.close()
                with self._lock:
                    self.counts["sent again"] += 1
                time.sleep(0.5)
                continue
            return "right" if np.allclose(vector, self._right[text], atol=0.02) else "wrong"
        return "lost"


def test_no_request_is_lost_while_each_container_is_restarted(
    compose: Compose, record_property: Callable[[str, object], None]
) -> None:
    def vectors(port: int) -> list[list[float]]:
        client = http.client.HTTPConnection("127.0.0.1", compose.ports[port], timeout=TIMEOUT_S)
        try:
            return [compose.ask(client, text) for text in TEXTS]
        except (OSError, http.client.HTTPException):
            return []

    began = time.monotonic()
    try:
        waiting.wait_for(lambda: vectors(8000) and vectors(8080), PATIENCE_S, 1.0)
    except AssertionError:
        raise AssertionError(compose("logs", "--tail=40")) from None
    record_property("ready after s", round(time.monotonic() - began))
    right = vectors(8000)
    np.testing.assert_allclose(vectors(8080), right, atol=0.02)
    load = Load(compose, REQUESTS, right)
    for number, service in enumerate(("triton", "gateway"), start=1):
        load.await_answers(number * REQUESTS // 3)
        compose("restart", "--timeout", "30", service)
    load.await_answers(REQUESTS)
    for outcome in ("right", "wrong", "lost", "sent again"):
        record_property(outcome, load.counts[outcome])
    assert load.counts["right"] == REQUESTS, load.counts
    states = compose("ps")
    assert states.count(" Up") == 2, states


def test_prometheus_reads_the_server_and_the_gateway(compose: Compose, tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus is installed (Debian: apt-get install prometheus)")
    shutil.copy(program, tmp_path)
    # Where Debian's keeps its data.
    lines = f"FROM {NAME}", "COPY prometheus /bin/", "USER 0", "RUN mkdir --parents /var/lib/prometheus/metrics2"
    (tmp_path / "Dockerfile").write_text("\n".join((*lines, 'ENTRYPOINT ["/bin/prometheus"]\n')))
    subprocess.run(["docker", "build", "--tag", PROMETHEUS, tmp_path], check=True)
    compose("--profile=observability", "up", "--detach", "prometheus")

    def targets() -> dict[str, str]:
        """Its job, by what Prometheus says of each target."""
        url = f"http://127.0.0.1:{compose.ports[9090]}/api/v1/targets"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                listed = json.load(answer)["data"]["activeTargets"]
        except OSError:
            return {}
        return {one["labels"]["job"]: one["lastError"] or one["health"] for one in listed}

    try:
        waiting.wait_for(lambda: targets() == {"triton": "up", "gateway": "up"}, PATIENCE_S, 1.0)
    except AssertionError:
        raise AssertionError(targets(), compose("logs", "--tail=20", "prometheus")) from None


def test_the_live_page_shows_what_is_served(compose: Compose) -> None:
    if chromium.BINARY is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    compose("--profile=live", "up", "--detach", "live")
    url = f"http://127.0.0.1:{compose.ports[8090]}/"

    def answers() -> bool:
        try:
            return urllib.request.urlopen(url, timeout=TIMEOUT_S).status == 200
        except OSError:
            return False

    async def look() -> None:
        async with chromium.browser() as tab:
            await tab.open(url)
            await tab.until("document.querySelector('#encode .drawn .tiles')?.textContent", PATIENCE_S)

    try:
        waiting.wait_for(answers, PATIENCE_S, 0.5)
        asyncio.run(look())
    except (AssertionError, TimeoutError):
        raise AssertionError(compose("logs", "--tail=20", "live")) from None
