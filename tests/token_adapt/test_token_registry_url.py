"""A task registry at a URL: the build reads a copy, the server keeps it up to date, commands change none."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift import settings
from shapeshift.build_engines.image import front as images
from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.registry import follow
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt.front import open_vision_model
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.token_adapt.tasks import registry
from shapeshift.token_adapt.tasks.registry import LAYOUT
from shapeshift.triton import model_config
from tests.registry_mirror.remote_registry import RemoteRegistry
from tests.token_adapt.token_tasks import front, paths, register, write_task
from tests.waiting import wait_for


@pytest.fixture
def published(project: Path, remote: RemoteRegistry) -> Path:
    """A built project whose registry of tasks is at the URL and has the task `one`."""
    write_task(project, "one", labels=3)
    register(project, "one")
    remote.upload(project / "tasks")
    publish(project, remote)
    return project


def publish(root: Path, remote: RemoteRegistry, **parameters: str) -> None:
    stated = front(root, tasks_dir=remote.url, registry_period_s="1", **parameters)
    assert images.publish(stated, paths(root), lambda step: None)[1] == "up to date"


def arguments(root: Path) -> ModelArgs:
    folder = root / "build" / "repository" / "classify_image"
    stated = dict(model_config.parameters(model_config.read(folder / "config.pbtxt")))
    return ModelArgs("classify_image", folder, {}, stated, "CPU", 0)


def test_tasks_at_a_url_are_followed(published: Path, remote: RemoteRegistry) -> None:
    args = arguments(published)
    assert args.parameters["registry_url"] == remote.url
    said: list[str] = []
    serving = settings.read(TokenAdaptSettings, args.parameters)
    follower = follow(args.parameters, (args.folder / serving.tasks_dir).resolve(), LAYOUT, said.append)
    model = open_vision_model(args, serving)
    try:
        assert not model.reload_tasks() and list(model.tasks) == ["one"]
        write_task(published, "two", labels=2)
        register(published, "two")
        remote.upload(published / "tasks")
        wait_for(lambda: not model.reload_tasks() and sorted(model.tasks) == ["one", "two"])
        remote.write("one/head.safetensors", b"damaged")
        write_task(published, "one", labels=4)
        register(published, "one")
        remote.write("registry.json", (published / "tasks" / "registry.json").read_bytes())
        wait_for(lambda: any("one is not taken over: sha256: got " in line for line in said))
        assert model.reload_tasks() == [] and len(model.tasks["one"].labels) == 3
    finally:
        follower.close()


def test_the_build_reads_the_url(published: Path, remote: RemoteRegistry) -> None:
    with pytest.raises(InvalidInputError, match="starter_dir: got 'tasks'; left out: tasks_dir is a URL"):
        publish(published, remote, starter_dir="tasks")
    publish(published, remote, task="one")
    remote.delete("one/profile.json")
    copy = published / "build" / "registries" / "classify_image"
    publish(published, remote, task="one")
    (entry,) = registry.read(copy)
    (entry.folder / "profile.json").unlink()
    with pytest.raises(InvalidInputError, match=r"tasks_dir: got .*one is not taken over"):
        publish(published, remote)
    remote.break_off(ConnectionError("refused"))
    with pytest.raises(OverloadedError, match="cannot be read: ConnectionError: refused"):
        publish(published, remote)


def test_commands_change_a_folder_and_no_url(
    published: Path, remote: RemoteRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["--build", str(published / "build")]
    assert main(["tasks", "remove", "one", *build]) == 2
    assert f"tasks_dir: got '{remote.url}'; a folder" in capsys.readouterr().err
    assert main(["tasks", "list", *build]) == 0
    assert capsys.readouterr().out.startswith("one ")
    assert main(["tasks", "remove", "one", *build, "--dir", str(published / "tasks")]) == 0
    assert registry.read(published / "tasks") == []
