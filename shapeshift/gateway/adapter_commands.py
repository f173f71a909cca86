"""Changes of a model's adapters, by the command that checks and registers them, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from shapeshift.errors import TimedOutError
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.settings import GatewaySettings

# Checking an adapter reads its weights, and imports torch.
_TIMEOUT_S = 120.0
# Seconds that a command has to undo its change.
_UNDO_S = 10.0


def folder_under(root: Path, path: str) -> Path:
    """The folder that `path` names, absolute or below `root`. Raises ApiError where it leads out of `root`."""
    allowed = root.resolve()
    try:
        found = (allowed / path).resolve()
    except (OSError, ValueError):
        found = Path("/")
    if not found.is_relative_to(allowed) or not found.is_dir():
        raise invalid("lora_path", path, "a folder under the gateway's --adapter-root")
    return found


class AdapterCommands:
    """Runs one change at a time, each within its time. One that has begun goes on when its client is gone."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._changing = asyncio.Lock()
        self._change: asyncio.Task[tuple[int, bytes]] | None = None

    async def add(self, model: str, name: str, path: str) -> None:
        """Register the adapter in `path`. Raises ApiError where it is refused, or changes are not allowed."""
        build, root = self._allowed()
        await self._run(build, model, ["add", name, str(folder_under(root, path))])

    async def remove(self, model: str, name: str) -> None:
        """Refuse new requests for the adapter. Raises as `add` does."""
        build, _ = self._allowed()
        await self._run(build, model, ["remove", name])

    async def close(self) -> None:
        """Have the change that runs undone, if one does."""
        if self._change is not None:
            self._change.cancel()
            await asyncio.wait([self._change])

    def _allowed(self) -> tuple[Path, Path]:
        if self._settings.registry is None or self._settings.adapter_root is None:
            text = "adapters are changed by `shapeshift adapters`, or by a gateway with --adapter-root"
            raise ApiError(501, text, "not_supported_error", code="unsupported")
        return self._settings.registry, self._settings.adapter_root

    async def _run(self, build: Path, model: str, arguments: Sequence[str]) -> None:
        options = [f"--model={model}", f"--build={build}"]
        command = ["-P", "-m", "shapeshift.cli.main", "adapters", *options, arguments[0], "--", *arguments[1:]]
        await self._changing.acquire()
        # From here on the change is no longer its client's: it ends or is undone as a whole.
        self._change = asyncio.create_task(_status_of(command, model))
        self._change.add_done_callback(lambda _: self._changing.release())
        status, said = await asyncio.shield(self._change)
        if status:
            lines = said.decode(errors="replace").strip().splitlines() or ["the command ended without a word"]
            text = lines[-1].removeprefix("shapeshift adapters: ")
            if "no adapter" in text:
                raise ApiError(404, text, param="lora_name", code="adapter_not_found")
            raise ApiError(400, text, param="lora_path" if arguments[0] == "add" else "lora_name", code="invalid_value")


async def _status_of(command: Sequence[str], model: str) -> tuple[int, bytes]:
    """The exit status of the command, and its standard error. Raises TimedOutError; an end before its own undoes it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise TimedOutError(f"adapters of {model}: no change after {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            await _undo(process)
    return process.returncode or 0, said


async def _undo(process: asyncio.subprocess.Process) -> None:
    """End the command, which removes what it has written; what is left after a kill, the next change removes."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_UNDO_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
