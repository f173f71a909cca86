"""A Ray cluster on this machine whose autoscaler starts machines: raylets, by Ray's fake provider of nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from bench.fleet.machines import in_session
from shapeshift.files import replace_private
from shapeshift.fleet.supervision.cluster import SETTINGS, has_started, start_ray
from shapeshift.triton.embedded.free_ports import free_ports

_HOST = "127.0.0.1"
_MEMORY = 80_000_000


@contextlib.contextmanager
def autoscaled_ray(folder: Path, most_machines: int) -> Iterator[str]:
    """The address of its head, which has one processor, as each further machine has. Ends all its processes.

    `ray.cluster_utils.AutoscalingCluster` is not used: it ends every Ray of this machine when it starts.
    """
    ports = free_ports()
    address = f"{_HOST}:{next(ports)}"
    (folder / "cluster.yaml").write_text(json.dumps(_cluster(address, most_machines)))
    replace_private(folder / "token", os.urandom(16).hex().encode())
    variables = {**SETTINGS, "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    before = dict(os.environ)
    os.environ.update(variables)
    options = ["--head", f"--node-ip-address={_HOST}", f"--port={address.rpartition(':')[2]}", "--num-cpus=1"]
    options += [f"--{name}-port={next(ports)}" for name in ("ray-client-server", "dashboard-agent-listen")]
    options += ["--include-dashboard=false", f"--autoscaling-config={folder / 'cluster.yaml'}"]
    log = folder / "ray.log"
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    process = start_ray(options, log, {**os.environ, **fake})
    try:
        assert has_started(process, log)
        yield address
    finally:
        for pid in in_session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        os.environ.clear()
        os.environ.update(before)


def _cluster(address: str, most_machines: int) -> dict[str, object]:
    """The cluster's file, in JSON, which is YAML as well."""
    head, machine = "ray.head.default", {"CPU": 1, "object_store_memory": _MEMORY}
    types = {
        head: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "machine": {"resources": machine, "node_config": {}, "min_workers": 0, "max_workers": most_machines},
    }
    fake = {
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
    }
    lists = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
    more = ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    return {
        "cluster_name": "fake",
        "max_workers": most_machines,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
        "provider": {"type": "fake_multinode", "gcs_address": address, **fake},
        "available_node_types": types,
        "head_node_type": head,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{name: [] for name in (*lists, *more)},
    }
