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
    """Runs one change at a time, each within its time."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._changing = asyncio.Lock()

    async def add(self, model: str, name: str, path: str) -> None:
        """Register the adapter in `path`. Raises ApiError where it is refused, or changes are not allowed."""
        build, root = self._allowed()
        await self._run(build, model, ["add", name, str(folder_under(root, path))])

    async def remove(self, model: str, name: str) -> None:
        """Refuse new requests for the adapter. Raises as `add` does."""
        build, _ = self._allowed()
        await self._run(build, model, ["remove", name])

    def _allowed(self) -> tuple[Path, Path]:
        if self._settings.registry is None or self._settings.adapter_root is None:
            text = "adapters are changed by `shapeshift adapters`, or by a gateway with --registry and --adapter-root"
            raise ApiError(501, text, "not_supported_error", code="unsupported")
        return self._settings.registry, self._settings.adapter_root

    async def _run(self, build: Path, model: str, arguments: Sequence[str]) -> None:
        options = [f"--model={model}", f"--build={build}"]
        command = ["-P", "-m", "shapeshift.cli.main", "adapters", *options, arguments[0], "--", *arguments[1:]]
        async with self._changing:
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
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines() or ["the command ended without a word"]
            text = lines[-1].removeprefix("shapeshift adapters: ")
            if "no adapter" in text:
                raise ApiError(404, text, param="lora_name", code="adapter_not_found")
            raise ApiError(400, text, param="lora_path" if arguments[0] == "add" else "lora_name", code="invalid_value")
