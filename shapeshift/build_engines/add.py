"""Adding a model: its folders are written, and for a server that runs it is built and loaded; all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shapeshift import files
from shapeshift.build_engines import new_model, publish
from shapeshift.build_engines.decode import DecodeFrontConfig
from shapeshift.build_engines.description import describe, published_ask
from shapeshift.build_engines.hub.sources import FILES, file_of, find_checkpoint
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.new_model import Files
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.publish import validate
from shapeshift.build_engines.recognition import Recognised, recognise
from shapeshift.build_engines.repository import read
from shapeshift.build_engines.text.workers import check_name
from shapeshift.engines import capacity, failures, hardware
from shapeshift.engines.capacity import Ask
from shapeshift.engines.checkpoint import find_file, find_folder, open_checkpoint
from shapeshift.errors import ShapeshiftError
from shapeshift.files import HASHES
from shapeshift.settings import require
from shapeshift.triton import model_config
from shapeshift.triton.names import check_model_name

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
Say = Callable[[str], None]


class Server(Protocol):
    """What is asked of a server that runs; `triton.control.ModelControl` is one."""

    def load(self, name: str) -> None: ...

    def unload(self, name: str) -> None: ...

    def wait_unloaded(self, name: str) -> None: ...


@dataclass(frozen=True)
class NewModel:
    """What to add: a folder, a name under the checkpoints or a hub id; empty name, technique: as the files say."""

    checkpoint: str
    name: str = ""
    technique: str = ""


def add(request: NewModel, paths: BuildPaths, server: Server | None, taken: Collection[str], say: Say) -> list[str]:
    """Add a model to `paths.repository`; with a server also build it and load it there. Returns the models' names.

    taken: names of the server's models. The caller holds the lock of builds. After any error the folders are as before,
    and the server's models too.
    """
    name = check_model_name(request.name or _default_name(request.checkpoint))
    folder = find_checkpoint(request.checkpoint, paths).folder
    recognised = recognise(folder, request.technique)
    machine = capacity.this_machine()
    sizes = new_model.sizes_of(recognised, folder, machine.available_mb, paths.build / HASHES)
    models = new_model.folders(name, _as_named(request.checkpoint, folder, paths), folder, recognised, sizes)
    existing = {file.parent.name for file in paths.repository.glob(f"*/{CONFIG}")}
    _require_free(models, existing, {*taken}, paths)
    with _draft(models, paths) as draft, contextlib.ExitStack() as undo:
        asks = [] if server is not None else _asks(existing, paths)
        asks += _checked(models, existing, draft, recognised, say)
        capacity.require_fit(asks, machine)
        if server is not None:
            for model in models:
                _build(model, draft, undo, say)
        if not paths.repository.exists():
            undo.callback(_remove_empty, paths.repository)
        for model in models:
            _place(model, draft, paths, undo)
        if server is not None:
            _load(models, server, undo, say)
            recorded = failures.read(paths.build)
            failures.record(paths.build, {model: why for model, why in recorded.items() if model not in models})
        undo.pop_all()
    return [*models]


def _default_name(checkpoint: str) -> str:
    """The last part of the path or hub id, without a revision or the end of a file's name."""
    last = _absolute(checkpoint).name if Path(checkpoint).is_dir() else Path(checkpoint).name.partition("@")[0]
    for suffix in FILES:
        last = last.removesuffix(suffix)
    return _NOT_IN_NAMES.sub("_", last).strip("._-")


def _as_named(checkpoint: str, folder: Path, paths: BuildPaths) -> str:
    """The checkpoint as config.pbtxt names it: below a folder of checkpoints by its name there, a hub id as it is.

    Another folder has the path that was given, links included: adapters may name their base model by it.
    """
    if Path(checkpoint).resolve() != folder and file_of(Path(checkpoint)) is None:
        return checkpoint
    path = _absolute(checkpoint)
    if path.is_file():
        return str(path)
    for top in paths.checkpoints:
        for inside in (top.absolute(), top.resolve()):
            if path.is_relative_to(inside) and path != inside:
                return str(path.relative_to(inside))
    return str(path)


def _absolute(path: str) -> Path:
    """`path` without `.` and `..`; links stay, except where `..` leaves one."""
    plain = Path(os.path.normpath(Path(path).absolute()))
    return plain if plain.resolve() == Path(path).resolve() else Path(path).resolve()


def _require_free(models: Collection[str], existing: set[str], taken: set[str], paths: BuildPaths) -> None:
    """Raise InvalidInputError for the first name that a model has already."""
    for model in models:
        folders = [top / model for top in (paths.repository, paths.generated) if (top / model).exists()]
        where = f"; there is {folders[0]}" if folders else "; the server has this model"
        free = not folders and model not in taken
        require(free, "name", model, f"a name that is free: give another with --as{where}")
    for one in existing:
        check_name(one, models)


@contextlib.contextmanager
def _draft(models: Mapping[str, Files], paths: BuildPaths) -> Iterator[BuildPaths]:
    """`paths` with a repository that holds only these models, until they are known to be good."""
    folder = paths.build / ".adding"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for model, contents in models.items():
            for file, text in contents.items():
                (folder / model / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / model / file).write_text(text, encoding="utf-8")
        yield BuildPaths(paths.root, paths.build, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _checked(
    models: Collection[str], existing: set[str], draft: BuildPaths, recognised: Recognised, say: Say
) -> list[Ask]:
    """Check the models and say what they will serve. Returns what they ask for."""
    asks = []
    for model in models:
        checked = validate(model, existing | {*models}, draft)
        lines, ask = describe(read(draft.repository / model), checked)
        asks.append(ask)
        technique = model_config.read(draft.repository / model / CONFIG).backend
        say(f"{model}: {technique} ({recognised.because})\n" + "\n".join(f"  {line}" for line in lines))
    return asks


def _asks(existing: Collection[str], paths: BuildPaths) -> list[Ask]:
    """What the models of the repository ask for: their engines, or before they are built their checkpoints."""
    asks = []
    for name in sorted(existing):
        with contextlib.suppress(ShapeshiftError, OSError):
            built = paths.generated / name
            folder = built if built.is_dir() else paths.repository / name
            config = model_config.read(folder / CONFIG)
            if folder == built:
                asks.append(published_ask(name, built, config))
                continue
            parameters = model_config.parameters(config)
            checkpoint = parameters.get("checkpoint", "")
            # Nothing of a hub is downloaded for this.
            if checkpoint and (find_folder(checkpoint, paths.checkpoints) or find_file(checkpoint, paths.checkpoints)):
                local = find_checkpoint(checkpoint, paths).folder
                if isinstance(front := read(folder), DecodeFrontConfig):
                    asks.append(describe(front, open_checkpoint(local, hashes=paths.build / HASHES))[1])
                    continue
                precision = hardware.resolve_precision(parameters.get("precision", "auto"))
                parameters |= {"checkpoint": str(local), "precision": precision}
            asks.append(capacity.ask_of(name, folder, parameters))
    return asks


def _build(model: str, draft: BuildPaths, undo: contextlib.ExitStack, say: Say) -> None:
    for folder in (draft.generated, draft.engines, draft.build / "tasks", draft.build / "adapters"):
        # Engines and registries of a model that was removed stay as they are.
        if not (folder / model).exists():
            undo.callback(shutil.rmtree, folder / model, ignore_errors=True)
    say(publish.publish(read(draft.repository / model), draft).partition("\n")[0])


def _place(model: str, draft: BuildPaths, paths: BuildPaths, undo: contextlib.ExitStack) -> None:
    target = paths.repository / model
    undo.callback(shutil.rmtree, target, ignore_errors=True)
    with files.replace_folder(target) as work:
        shutil.copytree(draft.repository / model, work, dirs_exist_ok=True)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _load(models: Collection[str], server: Server, undo: contextlib.ExitStack, say: Say) -> None:
    for model in models:
        undo.callback(_unload, server, model)
        say(f"loading {model}")
        server.load(model)


def _unload(server: Server, model: str) -> None:
    with contextlib.suppress(ShapeshiftError):
        server.unload(model)
        server.wait_unloaded(model)
