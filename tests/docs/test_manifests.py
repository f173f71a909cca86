"""The printed manifests, executed: `podman play kube` starts the node's pod and the sidecar's Deployment.

Needs root, podman (4.3, with catatonit), and the image `shapeshift-triton` of docker/Dockerfile in its storage. Where
no registry can be reached, standin.Dockerfile stands for the official container that it starts from:

    podman build --network host --build-arg BASE=... --tag standin --file tests/docs/standin.Dockerfile build/image
    podman build --network host --build-arg TRITON=standin --tag shapeshift-triton --file docker/Dockerfile .

What podman has not of a cluster, the test plays: the pod that the StatefulSet makes, DNS, the kubelet's `$(NAME)`,
modes of a Secret and memory of an emptyDir, and the hook before a stop. KEDA, the NetworkPolicy, the budget and the
ServiceMonitor are not executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shapeshift.fleet.manifests import ManifestSettings, render
from shapeshift.triton.embedded import processes
from tests import waiting
from tests.docs.docs_pages import PROJECT

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.timeout(900)]
NAME, IMAGE, KEY = "shapeshift", "shapeshift-triton", "0123456789abcdef" * 2
NODE, ADDRESS, NETWORK = f"{NAME}-0", "10.99.0.1", f"shapeshift-{os.getpid()}"
SERVICE = f"{NAME}.default.svc.cluster.local"
GENERATED = ("engines", "adapters", "tasks", "checkpoints", "sources")
TEXTS = {"short": "a short text", "long": "many words " * 60}


def podman(*arguments: str, text: str = "", check: bool = True) -> str:
    done = subprocess.run(["podman", *arguments], input=text, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """This thread, and what it starts, are in a network of their own with the node's address."""
    if shutil.which("podman") is None or os.geteuid():
        pytest.skip("needs podman, as root")
    if not podman("images", "--quiet", IMAGE, check=False).strip():
        pytest.skip(f"no image {IMAGE}: see the head of this file")
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(Path("/proc/self/ns/net").open())
        subprocess.run(["ip", "netns", "add", NETWORK], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "delete", NETWORK], check=True)
        with Path("/run/netns", NETWORK).open() as inside:
            assert libc.setns(inside.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        stack.callback(libc.setns, home.fileno(), 0)
        for command in (["link", "set", "lo", "up"], ["address", "add", f"{ADDRESS}/32", "dev", "lo"]):
            subprocess.run(["ip", *command], check=True)
        yield


@pytest.fixture(scope="module")
def claim(
    tmp_path_factory: pytest.TempPathFactory,
    light_checkpoint: Path,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Path:
    """What the claim of the models holds: `encode`, and `spread`, a front with two emulated workers."""
    folder = tmp_path_factory.mktemp("claim")
    shutil.copytree(light_checkpoint, folder / "checkpoints" / "light")
    spread = {"checkpoint": folder / "checkpoints" / "light", "bins": "16,64,512", "max_bins": 2, "workers": 2}
    add_front(folder / "model_repository", "spread", (5, 60), placement="partitioned", slo_ms=500, **spread)
    build_fronts(folder / "model_repository", folder / "build")
    for name in filter(lambda one: (PROJECT / "build" / one).is_dir(), GENERATED):
        shutil.copytree(
            PROJECT / "build" / name, folder / "build" / name, symlinks=True, copy_function=os.link, dirs_exist_ok=True
        )
    shutil.copytree(PROJECT / "build" / "repository" / "encode", folder / "build" / "repository" / "encode")
    shutil.copytree(PROJECT / "checkpoints", folder / "checkpoints", copy_function=os.link, dirs_exist_ok=True)
    # `make engines` makes it; the node's kernels are mounted there.
    (folder / "build" / "kernels").mkdir()
    for path in [folder.parent, folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    return folder


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def keys(folder: Path) -> Path:
    """The key of the node as the kubelet mounts it: links, and the mode and group that the manifest sets."""
    data = folder / "..2026_11_26"
    data.mkdir(parents=True)
    (data / NODE).write_text(KEY)
    (data / NODE).chmod(0o440)
    os.chown(data / NODE, 0, 1000)
    (folder / "..data").symlink_to(data.name)
    (folder / NODE).symlink_to(f"..data/{NODE}")
    return folder


def as_here(pod: dict[str, Any], folders: dict[str, Path]) -> None:
    """Let a pod run by podman 4.3. folders: by volume, what the kubelet would mount and podman does not."""
    pod["spec"] |= {"hostNetwork": True, "volumes": [*pod["spec"]["volumes"], {"name": "hosts"}]}
    for volume in pod["spec"]["volumes"]:
        if (path := folders.get(volume["name"])) is not None:
            kind = "File" if path.is_file() else "Directory"
            volume.pop("secret", None)
            volume.pop("emptyDir", None)
            volume["hostPath"] = {"path": str(path), "type": kind}
    for container in pod["spec"]["containers"]:
        for one in container.get("env", ()):
            if "value" in one:
                one["value"] = one["value"].replace("$(SHAPESHIFT_NODE)", NODE)
        ports = {one["name"]: one["containerPort"] for one in container.pop("ports", ())}
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            if name in container:
                probe = container[name]["httpGet"]
                probe["port"] = ports[probe["port"]]
        container["volumeMounts"].append({"name": "hosts", "mountPath": "/etc/hosts", "readOnly": True})


def played(objects: list[dict[str, Any]], claim: Path, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """The objects that podman takes: the ConfigMap, the claim, the pod of the StatefulSet, and the Deployment."""
    (nodes,), (sidecar,) = of_kind(objects, "StatefulSet"), of_kind(objects, "Deployment")
    node = {"apiVersion": "v1", "kind": "Pod", **nodes["spec"]["template"]}
    node["metadata"] = {**node["metadata"], "name": NODE}
    for pod in (node, sidecar["spec"]["template"]):
        as_here(pod, folders)
    annotations = {"device": str(claim), "type": "none", "mount-options": "bind"}
    metadata = {"annotations": {f"volume.podman.io/{name}": value for name, value in annotations.items()}}
    models = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{NAME}-models", **metadata},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "10Gi"}}},
    }
    return [*of_kind(objects, "ConfigMap"), models, node, sidecar]


@pytest.fixture(scope="module")
def pods(network: None, claim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    settings = ManifestSettings(memory="8Gi", cpu="1", image=f"localhost/{IMAGE}")
    folder = tmp_path_factory.mktemp("kubelet")
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {NODE}.{SERVICE} {SERVICE}\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        Path(shm).chmod(0o1777)
        folders = {"hosts": hosts, "keys": keys(folder / "keys"), "shm": Path(shm)}
        text = yaml.safe_dump_all(played(list(yaml.safe_load_all(render("kubernetes", settings))), claim, folders))
        try:
            podman("play", "kube", "-", text=text)
            yield
        finally:
            podman("play", "kube", "--down", "-", text=text, check=False)
            podman("volume", "rm", f"{NAME}-models", NAME, check=False)


def ask(path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://{ADDRESS}:8000/v2/{path}", data, timeout=20) as response:
        return json.loads(response.read() or b"{}")


def vector(model: str, text: str) -> list[float]:
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    answer: list[float] = ask(f"models/{model}/infer", {"inputs": [tensor]})["outputs"][0]["data"]
    return answer


def processes_of(model: str) -> list[int]:
    """The processes of the model's instances, by their numbers on this machine; none of another network."""
    here = Path("/proc/thread-self/ns/net").readlink()
    pids = [one.identity.pid for one in processes.stubs() if one.instance.startswith(f"{model}_0")]
    return [pid for pid in pids if Path(f"/proc/{pid}/ns/net").readlink() == here]


def serves(model: str, text: str = TEXTS["short"]) -> bool:
    try:
        return bool(vector(model, text))
    except OSError:
        return False


def log(pod: str) -> str:
    (name,) = (one for one in podman("ps", "--all", "--format", "{{.Names}}").split() if one.startswith(pod))
    return podman("logs", name)


def wait_for(condition: Callable[[], Any], pod: str, limit_s: float = 240.0) -> None:
    try:
        waiting.wait_for(condition, limit_s, 1.0)
    except AssertionError:
        raise AssertionError(log(pod)[-6000:]) from None


def test_a_node_serves_and_its_sidecar_heals_and_moves_workers(pods: None) -> None:
    node, sidecar = f"{NODE}-triton", f"{NAME}-sidecar-pod-0-sidecar"
    wait_for(lambda: serves("encode"), node)
    first = vector("encode", TEXTS["short"])
    assert len(first) == 384
    # The probes that the manifest states; podman turns the liveness probe into a health check.
    podman("healthcheck", "run", node)
    ask("models/encode/ready")
    # Model control needs the key, which both containers read with the modes of the manifest.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask("repository/index", {})
    wait_for(lambda: "plan spread" in log(sidecar), sidecar)
    wait_for(lambda: serves("spread"), sidecar)
    # A killed front: the sidecar, in another pod, loads it again.
    killed = processes_of("encode")
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes_of("encode") and not {*killed} & {*processes_of("encode")} and serves("encode"), sidecar)
    assert np.allclose(vector("encode", TEXTS["short"]), first, atol=1e-5)
    # Only long texts now: the next plan gives a worker another bin.
    plans = log(sidecar).count("plan spread")

    def moved() -> bool:
        for _ in range(20):
            vector("spread", TEXTS["long"])
        return log(sidecar).count("plan spread") > plans

    wait_for(moved, sidecar)
    # The hook before a stop, and the stop.
    podman("exec", node, "/opt/shapeshift/drain.sh")
    podman("stop", "--time", "60", node)
    # Not its status: 24.10 may crash at its end where a process of its models has died before.
    state = json.loads(podman("inspect", node))[0]["State"]
    assert not state["Running"] and not state["OOMKilled"]
