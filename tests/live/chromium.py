"""A real headless Chromium, driven over its DevTools protocol; and a script that keeps screenshots of the page.

`python -m tests.live.chromium http://127.0.0.1:8090/ FOLDER` photographs each panel.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_S = 30.0
_ANSWER_S = 20.0


class Tab:
    """One page. `log`: what it wrote to its console, and the requests to other places than its own server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.log: list[str] = []
        self.urls: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, _ANSWER_S)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size."""
        await self.call("Page.enable")
        await self.call("Runtime.enable")
        await self.call("Network.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What a script returns; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = _ANSWER_S) -> Any:
        """What a script returns, once that is true. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (value := await self.value(script)):
                await asyncio.sleep(0.2)
        return value

    async def photograph(self, file: Path, selector: str | None = None) -> None:
        """Write a PNG of the window, or of the first element that a selector finds."""
        clip: dict[str, Any] = {}
        if selector is not None:
            script = f"JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect())"
            box = json.loads(await self.value(script))
            top = await self.value("window.scrollY")
            area = {"x": box["x"] - 4, "y": box["y"] + top - 4, "width": box["width"] + 8, "height": box["height"] + 8}
            clip = {"clip": {**area, "scale": 1}, "captureBeyondViewport": True}
        picture = await self.call("Page.captureScreenshot", format="png", **clip)
        file.write_bytes(base64.b64decode(picture["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.log.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Network.requestWillBeSent":
                self.urls.append(data["params"]["request"]["url"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A tab of a new Chromium, which ends with the block."""
    assert BINARY is not None, "no Chromium is installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # In a container of root there is no sandbox for the browser.
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        process = await asyncio.create_subprocess_exec(
            *(BINARY, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", *root, "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            async with asyncio.timeout(_START_S):
                while not port_file.exists() or not (port := port_file.read_text().split("\n")[0]):
                    await asyncio.sleep(0.1)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(targets[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def photograph_panels(url: str, folder: Path, width: int, dark: bool, wait_s: float, only: list[str]) -> None:
    """Write NAME.png of each panel, and page.png of the whole page."""
    folder.mkdir(parents=True, exist_ok=True)
    async with browser() as tab:
        await tab.open(url, width, 1000, dark)
        await tab.until("document.querySelectorAll('.panel .plot, .panel .tiles').length > 0")
        await asyncio.sleep(wait_s)
        names = await tab.value("[...document.querySelectorAll('section.panel:not(.hidden)')].map(one => one.id)")
        for name in [one for one in names if not only or one in only]:
            await tab.photograph(folder / f"{name}.png", f"#{name}")
        if not only:
            await tab.photograph(folder / "page.png", ".page")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--wait", type=float, default=12.0, help="seconds before the photographs")
    parser.add_argument("--only", default="", help="panels, comma-separated")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []
    asyncio.run(photograph_panels(options.url, options.folder, options.width, options.dark, options.wait, only))


if __name__ == "__main__":
    main()
