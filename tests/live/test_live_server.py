"""The page of a real server under load, in a real browser: every panel moves, and its numbers are the server's own."""

from __future__ import annotations

import asyncio
import html
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.demo.load import BUSY, requests, send
from shapeshift.live.counters import Page
from shapeshift.triton import metrics
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.conftest import BUILD
from tests.live import chromium
from tests.live.chromium import Tab, browser

pytestmark = pytest.mark.server

FRONTS = ("encode", "generate", "generate_lora", "classify_image", "classify_text")
PANELS = ("encode", "generate", "lora", "image", "text", "sidecar")
PATIENCE_S = 90.0
LOAD_S = 20.0


@pytest.fixture
def served(
    server_settings: Callable[..., ServerSettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """One for each try: the page counts what came since it began, the server all."""
    models = [*FRONTS, "classify_text_large"]
    missing = [model for model in models if not (BUILD / "repository" / model).is_dir()]
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {BUILD / 'repository'}: run `make engines`")
    if chromium.BINARY is None:
        pytest.skip("no Chromium is installed: the page was not looked at (Debian: apt-get install chromium)")
    run_directory = tmp_path_factory.mktemp("live") / "build" / "run"
    with TritonServer(server_settings((BUILD / "repository",), models, run_directory)) as server:
        yield server.wait_ready(timeout_s=300)


@pytest.fixture
def command(served: TritonServer) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a command of `shapeshift` on the server's build folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        build = f"--build={served.settings.run_directory.parent}"
        line = [sys.executable, "-m", "shapeshift.cli.main", *arguments, build]
        started.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


async def drawn(tab: Tab, panel: str) -> str:
    return str(await tab.value(f"document.querySelector('#{panel} .drawn')?.innerHTML ?? ''"))


async def changes(tab: Tab, panel: str, times: int) -> None:
    """Wait until what a panel shows has changed so often. Raises TimeoutError."""
    for _ in range(times):
        before = json.dumps(await drawn(tab, panel))
        await tab.until(f"document.querySelector('#{panel} .drawn').innerHTML !== {before}", PATIENCE_S)


def label(panel: str, title: str) -> str:
    """What a plot of the panel says of itself."""
    words = re.findall(r'aria-label="([^"]*)"', panel)
    return next((html.unescape(one) for one in words if one.startswith(title)), "")


async def try_it(tab: Tab, panel: str, ends: str) -> str:
    """What a panel's box answers to its example, once the answer ends so."""
    await tab.value(f"document.querySelector('#{panel} .try .fields > button').click()")
    answer = f"document.querySelector('#{panel} .try .answer').textContent"
    await tab.until(f"{answer}.endsWith({json.dumps(ends)})", PATIENCE_S)
    return str(await tab.value(answer))


async def calls(tab: Tab, panel: str) -> list[str]:
    """The command and the program that the box shows for what was tried."""
    await tab.value(f"document.querySelector('#{panel} .try .q-expansion-item__container .q-item').click()")
    script = f"[...document.querySelectorAll('#{panel} .try code')].map(one => one.textContent).filter(one => one)"
    await tab.until(f"{script}.length >= 2", PATIENCE_S)
    return list(await tab.value(script))


def test_every_panel_is_seen_changing(
    served: TritonServer, command: Callable[..., subprocess.Popen[str]], free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    page = command("live", f"--port={port}")
    assert page.stdout is not None and f"http://127.0.0.1:{port}/" in page.stdout.readline()
    asyncio.run(watch(served, command, f"http://127.0.0.1:{port}/"))


async def watch(served: TritonServer, command: Callable[..., subprocess.Popen[str]], url: str) -> None:
    async with browser() as tab:
        await tab.open(url)
        await tab.until("document.querySelectorAll('section.panel .tiles').length >= 6", PATIENCE_S)
        assert "not running" in await drawn(tab, "sidecar")
        rates = {front: rate * 0.4 for front, rate in BUSY.items() if front in FRONTS}
        planned = requests(rates, LOAD_S, ["sentiment", "clock", "domain"])
        sending = asyncio.ensure_future(send(served.grpc_url, planned, PATIENCE_S))
        command("sidecar")
        await asyncio.gather(*(changes(tab, panel, 1 if panel == "sidecar" else 3) for panel in PANELS))
        assert "EMBEDDING: " in await try_it(tab, "encode", "ms)")
        assert "Paris" in await try_it(tab, "generate", "ms)")
        assert "LABEL: exchange_rate" in await try_it(tab, "text", "ms)")
        curl, program = await calls(tab, "encode")
        answers = await sending
        assert {answer.front for answer in answers} == set(FRONTS)
        assert [answer.error for answer in answers if answer.front in ("encode", "generate") and answer.error] == []
        await hold_against_metrics(tab, served)
        assert tab.log == []
        assert {one for one in tab.urls if not one.startswith((url, "data:", "blob:", "about:"))} == set()
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
        assert len(json.loads(answer.stdout)["outputs"][0]["data"]) == 384
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert answer.stdout.startswith("EMBEDDING [")
        served.stop()
        await tab.until("document.querySelector('header').textContent.includes('no answer')", PATIENCE_S)
        assert await tab.value("document.querySelectorAll('section.panel.stale:not(.hidden)').length") == len(PANELS)


async def hold_against_metrics(tab: Tab, served: TritonServer) -> None:
    """Once the load has ended, the page's numbers become those of the metrics page."""

    def numbers(page: Page) -> dict[str, Any]:
        resident, registered = (page.total("generate_lora", f"adapters_{name}") for name in ("resident", "known"))
        return {
            "texts": page.total("encode", "request_tokens_count"),
            "adapters": f"{resident:.0f} of {registered:.0f}",
            "slots": f"0 of {page.total('generate', 'slots'):.0f}",
            "answered": sorted(
                count for count in page.by("classify_text", "level_texts_total", "level").values() if count
            ),
            "gammas": {
                gamma: count
                for gamma, count in page.by("classify_image", "gamma_images_total", "gamma").items()
                if count
            },
        }

    shown, expected = dict[str, Any](), dict[str, Any]()
    for _ in range(40):
        expected = numbers(Page(metrics.scrape(served.metrics_url), 0.0))
        panels = {panel: await drawn(tab, panel) for panel in PANELS}
        texts = re.match(r"Lengths.*?\. (\d+) texts", label(panels["encode"], "Lengths"))
        answered = re.findall(r"model: (\d+) texts", label(panels["text"], "Who answered"))
        by_gamma = re.findall(r"gamma (-?\d+): (\d+) images", label(panels["image"], "Images by gamma"))
        shown = {
            "texts": float(texts[1]) if texts else None,
            "adapters": tile(panels["lora"], "adapters in memory now"),
            "slots": tile(panels["generate"], "slots in use now"),
            "answered": sorted(map(float, answered)),
            "gammas": {gamma: float(count) for gamma, count in by_gamma if count != "0"},
        }
        if shown == expected:
            return
        await asyncio.sleep(0.5)
    assert shown == expected


def tile(panel: str, words: str) -> str:
    shown = re.search(rf"<dt>{words}</dt><dd>([^<]*)", panel)
    return shown[1] if shown else ""
