"""The files for KServe and the Gateway API, held against what their APIs publish, and against our own metrics."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from shapeshift.fleet.manifests import ManifestSettings, render
from shapeshift.sidecar.health import HealthLimits
from tests.docs.docs_pages import PROJECT, blocks
from tests.docs.docs_sources import declared_metrics
from tests.schema_faults import faults

KSERVE = PROJECT / "docker" / "kserve" / "clusterservingruntime.yaml"
POOL = PROJECT / "docker" / "gateway-api" / "inferencepool.yaml"
# Of the published APIs: a field's type, the fields of an object, those of a list's items; a star: it has to be there.
PROBE = {"httpGet*": {"path*": str, "port*": int}, "timeoutSeconds": int, "periodSeconds": int, "failureThreshold": int}
CONTAINER = {
    "name*": str,
    "image*": str,
    "args": [str],
    "env": [{"name*": str, "value": str, "valueFrom": dict}],
    "ports": [{"containerPort*": int, "protocol": str}],
    "volumeMounts": [{"name*": str, "mountPath*": str, "readOnly": bool}],
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "resources": dict,
    "securityContext": dict,
}
VOLUMES = [{"name*": str, "emptyDir": dict, "secret": {"secretName*": str}, "configMap": {"name*": str}}]
LABELS = {"matchLabels*": dict}
KINDS: dict[str, dict[str, Any]] = {
    "serving.kserve.io/v1alpha1 ClusterServingRuntime": {
        "annotations": dict,
        "supportedModelFormats*": [{"name*": str, "version": str, "autoSelect": bool, "priority": int}],
        "protocolVersions": [str],
        "containers*": [CONTAINER],
        "volumes": VOLUMES,
    },
    "inference.networking.k8s.io/v1 InferencePool": {
        "selector*": LABELS,
        "targetPorts*": [{"number*": int}],
        "endpointPickerRef*": {"name*": str, "port": {"number*": int}, "failureMode": str, "group": str, "kind": str},
    },
    "v1 Service": {
        "selector": dict,
        "ports*": [{"name": str, "protocol": str, "port*": int, "targetPort": int, "appProtocol": str}],
    },
    "apps/v1 Deployment": {
        "replicas": int,
        "selector*": LABELS,
        "template*": {
            "metadata*": dict,
            "spec*": {"serviceAccountName": str, "containers*": [CONTAINER], "volumes": VOLUMES},
        },
    },
}
PICKER = {
    "apiVersion*": str,
    "kind*": str,
    "plugins*": [{"type*": str, "name": str, "parameters": dict}],
    "schedulingProfiles*": [{"name*": str, "plugins*": [{"pluginRef*": str, "weight": int}]}],
}


def objects() -> dict[str, dict[str, Any]]:
    found = [one for file in (KSERVE, POOL) for one in yaml.safe_load_all(file.read_text())]
    return {f"{one['apiVersion']} {one['kind']}": one for one in found}


def test_the_files_are_what_their_apis_publish() -> None:
    found = objects()
    assert {*found} == {*KINDS, "v1 ConfigMap"}
    for kind, schema in KINDS.items():
        assert faults(found[kind]["spec"], schema, kind) == []
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", found[kind]["metadata"]["name"])
    picker = yaml.safe_load(found["v1 ConfigMap"]["data"]["config.yaml"])
    assert faults(picker, PICKER) == []
    types = {plugin["type"] for plugin in picker["plugins"]}
    assert {one["pluginRef"] for profile in picker["schedulingProfiles"] for one in profile["plugins"]} == types


def test_kernels_are_compiled_where_models_look_for_them() -> None:
    (container,) = yaml.safe_load(KSERVE.read_text())["spec"]["containers"]
    repository = next(one["value"] for one in container["env"] if one["name"] == "REPOSITORY")
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    # `kernel_cache` of a generated configuration, relative to its folder.
    assert mounts["kernels"] == os.path.normpath(f"{repository}/generate/../../kernels")


def runtime_probes() -> dict[str, Any]:
    (container,) = yaml.safe_load(KSERVE.read_text())["spec"]["containers"]
    return dict(container)


def printed_probes() -> dict[str, Any]:
    (block,) = blocks(PROJECT / "docker" / "README.md", "yaml")
    return dict(yaml.safe_load(block.text))


def node_probes() -> dict[str, Any]:
    nodes = (
        one for one in yaml.safe_load_all(render("kubernetes", ManifestSettings())) if one["kind"] == "StatefulSet"
    )
    (container,) = next(nodes)["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("container", [runtime_probes, printed_probes, node_probes])
def test_a_container_is_started_again_where_a_dead_model_stays_so(container: Callable[[], dict[str, Any]]) -> None:
    """From 25.12 on a model whose process has died is not ready, though the server is alive."""
    probes = [container()[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    startup, liveness, readiness = probes
    assert len({probe["httpGet"]["path"] for probe in probes}) == 1
    assert re.fullmatch(r"/v2/models/[\w{.}]+/ready", readiness["httpGet"]["path"])
    # The sidecar loads it again before, also where a process hangs; a scrape a second.
    scrapes = max(dataclasses.astuple(HealthLimits()))
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 4 * scrapes
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    # Pods get no requests long before they are started again.
    assert readiness.get("periodSeconds", 10) * readiness.get("failureThreshold", 3) <= 30


def test_wrong_files_would_be_found() -> None:
    schema = KINDS["inference.networking.k8s.io/v1 InferencePool"]
    pool = objects()["inference.networking.k8s.io/v1 InferencePool"]["spec"]
    assert faults({**pool, "targetPorts": [{"number": "8080"}]}, schema) == [".targetPorts[0].number: '8080'"]
    assert faults({**pool, "ports": 1}, schema) == [".ports"]
    assert faults({"selector": pool["selector"]}, schema) == [".targetPorts*", ".endpointPickerRef*"]


def test_the_parts_of_the_pool_name_each_other() -> None:
    found = objects()
    pool, service = found["inference.networking.k8s.io/v1 InferencePool"], found["v1 Service"]
    deployment = found["apps/v1 Deployment"]
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] == service["spec"]["ports"][0]["port"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]


def test_the_picker_reads_gauges_that_exist() -> None:
    (container,) = objects()["apps/v1 Deployment"]["spec"]["template"]["spec"]["containers"]
    options = [re.fullmatch(r"--([a-z-]+)-metric=(\w+)\{model=\w+\}", one) for one in container["args"]]
    read = {option[1]: option[2] for option in options if option}
    assert {*read} == {"total-queued-requests", "kv-cache-usage-percentage", "lora-info"}
    metrics = declared_metrics()
    assert all(metrics[name][0] == "gauge" for name in read.values())
    # The labels that the picker's protocol names.
    assert {*metrics[read["lora-info"]][1]} == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
