"""Every panel and rule, asked of a real Prometheus that reads two loaded servers of a fleet and a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from bench.common.front_variants import ENGINES, publish_variant
from bench.demo.load import BUSY, Request, requests, send
from docker.observability import dashboards
from shapeshift.engines import manifest
from shapeshift.fleet.metrics_proxy import CERTIFICATE_EXPIRY
from shapeshift.gateway.http import api_keys
from shapeshift.triton import model_config
from tests.conftest import BUILD
from tests.docs.test_dashboards import FOLDER, panels, rules
from tests.polymorph.fleet_nodes import Fleet
from tests.waiting import wait_for

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(900)]

PROMETHEUS = shutil.which("prometheus")
# Parameters with which each metric exists: workers, queues by size, proposed tokens.
CHANGED = {
    "generate": {"num_speculative_tokens": "4"},
    "generate_lora": {"scheduler": "chameleon"},
}
MODELS = ("classify_image", "generate", "generate_lora", "classify_text", "classify_text_large")
ENCODE, WORKER = "encode", "encode_w00"
ADAPTERS = ("sentiment", "clock", "domain")
RANGE_S, STEP_S = 60, 2
PATIENCE_S = 240.0


def repositories(folder: Path) -> dict[str, Path]:
    """By node the generated models that it serves: all on a, one that generates on b."""
    found = {node: folder / node / "repository" for node in "ab"}
    for node, models in (("a", MODELS), ("b", ("generate",))):
        for model in models:
            shutil.copytree(BUILD / "repository" / model, found[node] / model)
            file = found[node] / model / "config.pbtxt"
            config = model_config.read(file)
            stated = {name: value for name, value in model_config.parameters(config).items() if value.startswith("../")}
            absolute = {name: str((BUILD / "repository" / model / value).resolve()) for name, value in stated.items()}
            for name, value in {**absolute, **CHANGED.get(model, {})}.items():
                model_config.set_parameter(config, name, value)
            model_config.write(config, file)
    one = {"placement": "resident", "workers": "1", "min_workers": "1", "max_workers": "1"}
    publish_variant(ENCODE, manifest.load(ENGINES).engines, found["a"], packs_rows=True, parameters=one)
    return found


@pytest.fixture(scope="module")
def fleet(make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if PROMETHEUS is None:
        pytest.skip("no Prometheus is installed: no panel was asked for data (Debian: apt-get install prometheus)")
    for model in (*MODELS, ENCODE):
        if not (BUILD / "repository" / model).is_dir():
            pytest.skip(f"no {BUILD / 'repository' / model}: run `make engines`")
    folder = tmp_path_factory.mktemp("observed")
    places = repositories(folder)
    models = {"a": (*MODELS, ENCODE, WORKER), "b": ("generate",)}
    found = Fleet(folder / "fleet.toml", {})
    try:
        for node, place in places.items():
            found.servers[node] = make_server((place,), models[node], folder / node / "build" / "run")
        found.state(*places)
        for node in places:
            found.start(node)
        for server in found.servers.values():
            server.wait_ready(timeout_s=300)
        wait_for(lambda: found.metric("a", "shapeshift_fleet_nodes", model="generate") == 2, pause_s=0.2)
        yield found
    finally:
        for server in found.servers.values():
            server.stop()


@contextmanager
def limited_gateway(fleet: Fleet, port: int, keys: Path) -> Iterator[str]:
    """A gateway before node a with one key, which may ask 30 times a minute; yields the key."""
    key, settings = api_keys.add(keys, "tests"), fleet.servers["a"].settings
    options = {
        "--triton": settings.grpc_url,
        "--metrics": settings.metrics_url,
        "--port": port,
        "--api-keys": keys,
        "--requests-per-minute": 30,
        "--build": settings.run_directory.parent,
    }
    line = [sys.executable, "-m", "shapeshift.cli.main", "gateway", *(f"{name}={one}" for name, one in options.items())]
    environment = {**os.environ, **settings.shared_variables}
    with (
        (keys.parent / "gateway.log").open("wb") as log,
        subprocess.Popen(line, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(lambda: ask(f"127.0.0.1:{port}", key), pause_s=1.0)
            yield key
        finally:
            process.terminate()


def ask(gateway: str, key: str) -> bool:
    """Read a stream of a few tokens; false where there is none."""
    body = json.dumps({"model": "generate", "prompt": "one two", "max_tokens": 8, "stream": True}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{gateway}/v1/completions", body, headers), timeout=60
        ) as answer:
            return bool(answer.read())
    except OSError:
        return False


@contextmanager
def under_load(fleet: Fleet, gateway: str, key: str) -> Iterator[None]:
    """Requests to each front of node a, and to the gateway before it, until the end."""
    stop = threading.Event()
    words = "one two three four one two three four one two three "
    burst = [
        Request(
            1.0, "generate", {"text_input": [words], "max_tokens": [[24]], "stream": [True], "ignore_eos": [True]}, {}
        )
    ] * 8

    def run() -> None:
        while not stop.is_set():
            planned = requests({front: rate * 0.3 for front, rate in BUSY.items()}, 10.0, ADAPTERS)
            asyncio.run(send(fleet.servers["a"].grpc_url, sorted([*planned, *burst], key=lambda one: one.at), 20.0))
            # Some of these are beyond the key's limit.
            for _ in range(8):
                ask(gateway, key)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Prometheus:
    """A running one, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: Any) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """What the last minute shows of an expression; values that are no numbers are left out."""
        now = time.time()
        found = self.ask("query_range", query=expression, start=now - RANGE_S, end=now, step=STEP_S)["result"]
        return [float(value) for series in found for _, value in series["values"] if value != "NaN"]

    def labels(self, query: str) -> list[str]:
        """What Grafana offers for a variable with this query."""
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match is not None, query
        return list(self.ask(f"label/{match[2]}/values", **{"match[]": match[1]}))


@pytest.fixture(scope="module")
def prometheus(
    fleet: Fleet, free_ports: Callable[[int], list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """One with the project's configuration that looks every second, while the servers are under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    port, gateway_port = free_ports(2)
    gateway = f"127.0.0.1:{gateway_port}"
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    pages = [urllib.parse.urlparse(one.metrics_url).netloc for one in fleet.servers.values()]
    jobs["triton"]["static_configs"] = [{"targets": pages}]
    # As a comment of the file has it.
    jobs["gateway"] |= {
        "static_configs": [{"targets": [gateway]}],
        "authorization": {"credentials_file": "gateway.key"},
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copyfile(FOLDER / "rules.yml", folder / "rules.yml")
    line = [
        str(PROMETHEUS),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        limited_gateway(fleet, gateway_port, folder / "keys") as key,
        (folder / "log").open("wb") as log,
        subprocess.Popen(line, cwd=folder, stdout=log, stderr=log) as running,
    ):
        (folder / "gateway.key").write_text(key)
        try:
            with under_load(fleet, gateway, key):
                found = Prometheus(port)
                wait_for(lambda: _answers(found), pause_s=0.2)
                yield found
        finally:
            running.terminate()


def _answers(prometheus: Prometheus) -> bool:
    try:
        return len(prometheus.values("up == 1")) > 0
    except OSError:
        return False


def filled(expression: str, variables: Mapping[str, list[str]]) -> str:
    """An expression as Grafana sends it."""
    for name, values in variables.items():
        expression = expression.replace(
            f"${name}", "|".join(re.escape(value) for value in values).replace("\\", "\\\\")
        )
    return expression.replace("$__rate_interval", "30s")


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_every_panel_has_data(name: str, prometheus: Prometheus) -> None:
    made = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
    queries = {one["name"]: one["query"] for one in made["templating"]["list"] if one["type"] == "query"}
    empty: dict[str, str] = {}

    def every_line_has_some() -> bool:
        variables: dict[str, list[str]] = {}
        for variable, query in queries.items():
            variables[variable] = prometheus.labels(filled(query, variables))
        expressions = {
            f"{panel['title']}: {target['legendFormat']}": filled(target["expr"], variables)
            for panel in panels(name)
            for target in panel["targets"]
            # These nodes are on one machine, without certificates.
            if CERTIFICATE_EXPIRY not in target["expr"]
        }
        empty.clear()
        empty.update({line: text for line, text in expressions.items() if not prometheus.values(text)})
        return all(variables.values()) and not empty

    try:
        wait_for(every_line_has_some, PATIENCE_S, pause_s=2.0)
    except AssertionError:
        pytest.fail(f"no data: {json.dumps(empty, indent=1)}")


def test_every_rule_reads_something(prometheus: Prometheus) -> None:
    for rule in rules():
        # What is compared has values whether or not the rule fires.
        compared = re.sub(r" (?:==|>=|>|<) [\d.]+(?: \* \d+)?(?=\s+or\b|\s*$)", "", rule["expr"])
        assert compared != rule["expr"]
        for expression in re.split(r"\s+or\s+", compared):
            if "gateway" not in expression and CERTIFICATE_EXPIRY not in expression:
                wait_for(lambda: prometheus.values(expression), PATIENCE_S, pause_s=1.0)  # noqa: B023
    states = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {state["name"]: (state["health"], state.get("lastError")) for state in states} == {
        rule["alert"]: ("ok", None) for rule in rules()
    }
    assert {state["name"] for state in states if state["state"] == "firing"} <= {"RegistryRefused"}
