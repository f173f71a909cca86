"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError, TimedOutError
from shapeshift.gateway.adapter_commands import AdapterCommands
from shapeshift.gateway.http import api_keys
from shapeshift.gateway.settings import GatewaySettings
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, FakeTriton

KEY = "sk-of-this-test"
# In place of `shapeshift adapters`: it writes down how it was called, or refuses.
COMMAND = """
import sys
if "refused" in sys.argv:
    sys.exit("shapeshift adapters: rank: got 999; at most 64; no adapter")
if "absent" in sys.argv:
    sys.stderr.write("shapeshift adapters: name: 'absent' is not known\\n")
    sys.exit(3)
open("{log}", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""
# One that waits for a file before it ends, and undoes what it did at SIGTERM.
SLOW = """
import pathlib, signal, sys, time
begun = pathlib.Path("{log}." + sys.argv[-2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    begun.touch()
    while not pathlib.Path("{log}.go").exists():
        time.sleep(0.01)
except BaseException:
    begun.unlink(missing_ok=True)
    raise
open("{log}", "a").write(sys.argv[-2] + "\\n")
"""


def put_in_place(folder: Path, command: str, log: Path) -> None:
    """Write the module `shapeshift.cli.main` below a folder that is looked into first."""
    package = folder / "first" / "shapeshift" / "cli"
    package.mkdir(parents=True, exist_ok=True)
    (package / "main.py").write_text(command.format(log=log))
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    calls = tmp_path / "calls"
    put_in_place(tmp_path, COMMAND, calls)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    return calls


@pytest.fixture
def url(start_gateway: Callable[..., str], tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(f"ana {api_keys.hash_of(KEY)}\n")
    (tmp_path / "root" / "style").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    settings = {"build": tmp_path / "build", "adapter_root": tmp_path / "root", "api_keys": tmp_path / "keys"}
    return start_gateway(FakeTriton(), **settings)


def load(url: str, name: str, path: str, **more: Any) -> tuple[int, str]:
    answer = post(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})
    return answer.status_code, answer.text


def post(url: str, body: dict[str, Any]) -> Any:
    return HTTP.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"})


def test_an_adapter_is_added_and_removed_by_the_command(url: str, log: Path, tmp_path: Path) -> None:
    assert load(url, "new", "style") == (200, "Success: LoRA adapter 'new' added successfully.")
    assert load(url, "shout", str(tmp_path / "root" / "style"), load_inplace=True)[0] == 200
    gone = post(f"{url}/v1/unload_lora_adapter", {"lora_name": "shout"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'shout' removed successfully.")
    head = f"adapters --model=generate_lora --build={tmp_path}/build"
    style = tmp_path / "root" / "style"
    assert log.read_text().splitlines() == [
        f"{head} add -- new {style}",
        f"{head} add -- shout {style}",
        f"{head} remove -- shout",
    ]


@pytest.mark.parametrize("path", ["..", "link", "/etc", "absent", "style/../../outside", "a\0b"])
def test_a_path_stays_under_the_root(url: str, log: Path, path: str) -> None:
    status, text = load(url, "new", path)
    assert status == 400 and '"param":"lora_path"' in text and not log.exists()


def test_what_the_command_refuses(url: str, log: Path) -> None:
    assert load(url, "refused", "style")[0] == 400
    assert "rank: got 999; at most 64" in load(url, "refused", "style")[1]
    assert "load_inplace replaces it" in load(url, "shout", "style")[1]
    absent = post(f"{url}/v1/unload_lora_adapter", {"lora_name": "absent"})
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "adapter_not_found")
    assert load(url, "new", "style", model="encode")[0] == 400
    assert not log.exists()


def test_without_a_root_nothing_is_changed(start_gateway: Callable[..., str], log: Path) -> None:
    url = start_gateway(FakeTriton())
    status, text = load(url, "new", "/tmp")
    assert status == 501 and "--adapter-root" in text and not log.exists()


def test_changes_want_keys() -> None:
    with pytest.raises(InvalidInputError, match="api_keys"):
        GatewaySettings(adapter_root=Path("root"))


def commands(tmp_path: Path, log: Path, timeout_s: float = 600.0) -> AdapterCommands:
    put_in_place(tmp_path, SLOW, log)
    (tmp_path / "root").mkdir()
    build, root, keys = (tmp_path / name for name in ("build", "root", "keys"))
    return AdapterCommands(GatewaySettings(build=build, adapter_root=root, api_keys=keys), timeout_s)


async def until(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


def test_a_change_that_has_begun_is_finished_when_its_client_is_gone(tmp_path: Path, log: Path) -> None:
    changes = commands(tmp_path, log)

    async def run() -> None:
        first, second, third = (asyncio.create_task(changes.add("m", name, "")) for name in ("one", "two", "three"))
        await until(Path(f"{log}.one"))
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        Path(f"{log}.go").touch()
        await third

    asyncio.run(asyncio.wait_for(run(), 60))
    assert log.read_text().splitlines() == ["one", "three"], "the second had not begun"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_change_that_is_late_or_whose_gateway_stops_is_undone(tmp_path: Path, log: Path, is_late: bool) -> None:
    # On a slow machine the command has not begun by then.
    changes = commands(tmp_path, log, timeout_s=1.0 if is_late else 600.0)

    async def run() -> None:
        change = asyncio.create_task(changes.add("m", "one", ""))
        if not is_late:
            await until(Path(f"{log}.one"))
            await changes.close()
        with pytest.raises(TimedOutError if is_late else asyncio.CancelledError):
            await change

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not log.exists() and not Path(f"{log}.one").exists()


@pytest.mark.parametrize(
    ("path", "front", "body"),
    [
        ("/v1/embeddings", "encode", {"input": ["a", "b", "c", "d", "e"]}),
        ("/embed", "encode", {"inputs": "a"}),
        ("/v2/embed", "encode", {"texts": ["a"]}),
        ("/v1/rerank", "cross", {"query": "a", "documents": ["b", "c"]}),
        ("/rerank", "cross", {"query": "a", "texts": ["b"]}),
        ("/v1/score", "cross", {"text_1": "a", "text_2": ["b"]}),
        ("/v1/classify", "classify_raw", {"input": ["a"]}),
        ("/predict", "classify_raw", {"inputs": "a"}),
    ],
)
def test_vectors_and_scores_have_adapters(
    path: str, front: str, body: dict[str, Any], start_gateway: Callable[..., str]
) -> None:
    triton = FakeTriton({**FRONTS, front: {**FRONTS[front], "adapters": ["tenant"]}})
    url = f"{start_gateway(triton)}{path}"
    for model in (f"{front}:tenant", "tenant"):
        answer = HTTP.post(url, json={"model": model, **body})
        assert answer.status_code == 200, answer.text
        assert triton.calls and {call.model for call in triton.calls} == {front}
        assert all(call.parameters["lora_name"] == "tenant" for call in triton.calls)
    triton.calls.clear()
    assert HTTP.post(url, json={"model": front, **body}).status_code == 200
    assert triton.calls and all("lora_name" not in call.parameters for call in triton.calls)
    missing = HTTP.post(url, json={"model": f"{front}:other", **body})
    assert missing.status_code == 404 and f"{front}:other" in missing.text
