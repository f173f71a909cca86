"""The page in a real browser over a server that dies, comes back, is half dead, is of another version, or a node."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeshift.triton.embedded import run_record
from shapeshift.triton.embedded.run_record import Identity, Record
from tests.live import chromium
from tests.live.chromium import Tab, browser
from tests.live.servers import MetricsServer, page_text, ring

PATIENCE_S = 60.0
HEADER = "(document.querySelector('header')?.textContent ?? '')"
SHOWN = "!document.querySelector('#fleet').classList.contains('hidden')"

pytestmark = [
    pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
    pytest.mark.timeout(300),
]


class Fake:
    """A server whose models e, g, i and t beat, but those in `dead`; `series`: what its page shows beside that."""

    def __init__(self, run_directory: Path) -> None:
        self.dead: set[str] = set()
        self.series: dict[str, float] = {}
        self._run_directory = run_directory
        self._beats = dict.fromkeys("egit", 1.0)
        self._ending = threading.Event()
        self._server: MetricsServer | None = None
        self.events = ring(run_directory, "g", os.getpid())
        threading.Thread(target=self._beat, daemon=True).start()

    def start(self) -> None:
        """Listen at a port that it did not have before."""
        self._server = MetricsServer()
        nobody = Identity(1, 1)
        ports = {"http": 1, "grpc": 1, "metrics": self._server.port}
        about = {"host": "127.0.0.1", "ports": ports}
        record = Record(nobody, nobody, nobody, run_record.new_prefix(), about=about, boot=run_record.boot_id())
        run_record.write(record, self._run_directory / "server.json")

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        self._ending.set()
        self.stop()

    def _beat(self) -> None:
        while not self._ending.wait(0.2):
            for model in self._beats.keys() - self.dead:
                self._beats[model] += 0.2
            beats = {f"{model} heartbeat_total": beat for model, beat in self._beats.items()}
            self.events.write("nodes", {"rows": [["a", True, 3.0, "0.2.0", 0.0], ["b", True, 5.0, "0.2.0", 1.25]]})
            if (server := self._server) is not None:
                server.text = page_text({**beats, **self.series})


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    made = Fake(tmp_path / "run")
    yield made
    made.close()


def test_the_page_says_what_is_wrong_and_recovers(
    fake: Fake, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    line = [sys.executable, "-m", "shapeshift.cli.main", "live", f"--port={port}", f"--build={tmp_path}"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and str(port) in process.stdout.readline()
            asyncio.run(watch(fake, f"http://127.0.0.1:{port}/"))
        finally:
            process.terminate()


async def says(tab: Tab, words: str) -> None:
    await tab.until(f"{HEADER}.includes({json.dumps(words)})", PATIENCE_S)


async def watch(fake: Fake, url: str) -> None:
    async with browser() as tab:
        await tab.open(url)
        await says(tab, "no answer")
        fake.start()
        await says(tab, "serving")
        assert not await tab.value(SHOWN), "this server is in no fleet"
        fake.series = {"g fleet_nodes": 2, "g requests_total code=OK": 1, "i requests_total code=OK": 1}
        await tab.until(SHOWN, PATIENCE_S)
        rows = "[...document.querySelectorAll('#fleet tr')].map(one => one.innerText.split('\\t').join('|'))"
        await tab.until(f"{rows}.includes('b|serves|5|1.25 ms|0|0.2.0')", PATIENCE_S)
        assert await tab.value("document.querySelector('nav').textContent.includes('Many servers as one')")
        fake.dead = {"e", "t"}
        await says(tab, "2 models do not serve")
        assert "e (no heartbeat), t (no heartbeat)" in await tab.value(HEADER)
        fake.dead = set()
        await says(tab, "serving")
        # In another version a gamma may be no number.
        fake.series["i gamma_images_total gamma=wide"] = 4
        await tab.until(
            "document.querySelector('#image').textContent.includes('cannot be drawn from what the server')", PATIENCE_S
        )
        fake.stop()
        await says(tab, "no answer")
        assert await tab.value("document.querySelectorAll('section.panel:not(.stale)').length") == 0
        fake.start()
        await says(tab, "serving")
        await tab.until("document.querySelectorAll('section.panel.stale').length === 0", PATIENCE_S)
        assert tab.log == []
