"""Changes of a model's adapters, by the command that checks and registers them, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from shapeshift.errors import NO_ADAPTER, TimedOutError
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.settings import GatewaySettings

# Seconds that a command has to undo its change.
_UNDO_S = 10.0


def folder_under(root: Path, path: str) -> Path:
    """The folder that `path` names, absolute or below `root`. Raises ApiError where it leads out of `root`."""
    allowed = root.resolve()
    try:
        folder = (allowed / path).resolve()
    except (OSError, ValueError):
        folder = Path("/")
    if not folder.is_relative_to(allowed) or not folder.is_dir():
        raise invalid("lora_path", path, "a folder under the gateway's --adapter-root")
    return folder


class AdapterCommands:
    """Runs one change at a time. One that has begun goes on when its client is gone.

    timeout_s: for one change, which reads the weights of an adapter and imports torch.
    """

    def __init__(self, settings: GatewaySettings, timeout_s: float = 120.0) -> None:
        self._build = settings.build
        self._root = settings.adapter_root
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()
        self._change: asyncio.Task[tuple[int, bytes]] | None = None

    async def add(self, model: str, name: str, path: str) -> None:
        """Register the adapter in `path`. Raises ApiError where it is refused, or changes are not allowed."""
        await self._run(model, ["add", name, str(folder_under(self._allowed_root(), path))])

    async def remove(self, model: str, name: str) -> None:
        """Refuse new requests for the adapter. Raises as `add` does."""
        self._allowed_root()
        await self._run(model, ["remove", name])

    async def close(self) -> None:
        """Have the change that runs undone, if one does."""
        if self._change is not None:
            self._change.cancel()
            await asyncio.wait([self._change])

    def _allowed_root(self) -> Path:
        if self._root is None:
            text = "adapters are changed by `shapeshift adapters`, or by a gateway with --adapter-root"
            raise ApiError(501, text, "not_supported_error", code="unsupported")
        return self._root

    async def _run(self, model: str, arguments: Sequence[str]) -> None:
        options = [f"--model={model}", f"--build={self._build}"]
        command = ["-P", "-m", "shapeshift.cli.main", "adapters", *options, arguments[0], "--", *arguments[1:]]
        await self._changing.acquire()
        # From here on the change is no longer its client's: it ends or is undone as a whole.
        self._change = asyncio.create_task(_status_of(command, model, self._timeout_s))
        self._change.add_done_callback(lambda _: self._changing.release())
        status, said = await asyncio.shield(self._change)
        if status:
            lines = said.decode(errors="replace").strip().splitlines() or ["the command ended without a word"]
            text = lines[-1].removeprefix("shapeshift adapters: ")
            if status == NO_ADAPTER:
                raise ApiError(404, text, param="lora_name", code="adapter_not_found")
            raise ApiError(400, text, param="lora_path" if arguments[0] == "add" else "lora_name", code="invalid_value")


async def _status_of(command: Sequence[str], model: str, timeout_s: float) -> tuple[int, bytes]:
    """The exit status of the command, and its standard error. Raises TimedOutError; an end before its own undoes it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, said = await process.communicate()
    except TimeoutError:
        raise TimedOutError(f"adapters of {model}: no change after {timeout_s:g} s") from None
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
