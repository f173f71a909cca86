"""The files for Kubernetes as they are printed, held against the API's schemas, and against each other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError
from shapeshift.fleet import settings
from shapeshift.fleet.manifests import KINDS, ManifestSettings, render
from shapeshift.fleet.settings import HOSTNAME, METRICS_OFFSET, DnsSettings, RaySettings
from shapeshift.serving.model_args import FLEET_FILE_VARIABLE, NODE_VARIABLE
from tests.docs.docs_pages import PROJECT
from tests.docs.docs_sources import declared_metrics
from tests.schema_faults import faults

VERSION = kubernetes_validate.latest_version()
ENDPOINTS = [{"port*": str, "path": str, "interval": str, "scheme": str, "tlsConfig": dict}]
SELECTOR = {"matchLabels*": dict}
GROUP = {"rayStartParams*": dict, "template*": {"metadata*": dict, "spec*": dict}}
# Of the published custom resources, the fields that we may state; a star: it has to be there.
CUSTOM: dict[str, dict[str, Any]] = {
    "monitoring.coreos.com/v1 ServiceMonitor": {"selector*": SELECTOR, "endpoints*": ENDPOINTS},
    "keda.sh/v1alpha1 ScaledObject": {
        "scaleTargetRef*": {"apiVersion": str, "kind": str, "name*": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "pollingInterval": int,
        "cooldownPeriod": int,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": dict}},
        "triggers*": [
            {
                "type*": str,
                "metricType": str,
                "metadata*": {"serverAddress*": str, "query*": str, "threshold*": str, "activationThreshold": str},
            }
        ],
    },
    "ray.io/v1 RayCluster": {
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": {"idleTimeoutSeconds": int, "upscalingMode": str, "resources": dict},
        "headGroupSpec*": GROUP,
        "workerGroupSpecs": [
            {**GROUP, "groupName*": str, "replicas": int, "minReplicas*": int, "maxReplicas*": int},
        ],
    },
    "ray.io/v1 RayJob": {"clusterSelector": dict, "entrypoint": str, "submissionMode": str, "backoffLimit": int},
}


def objects(kind: str, *options: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the command prints."""
    assert main(["fleet", "manifests", kind, *options]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.fixture(params=KINDS)
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return objects(request.param, "--gpus", "1", "--namespace", "models", capsys=capsys)


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every template of a pod."""
    for one in found:
        spec = one.get("spec", {})
        groups = [*spec.get("workerGroupSpecs", []), *filter(None, [spec.get("headGroupSpec")])]
        yield from (group["template"] for group in groups)
        if "template" in spec:
            yield spec["template"]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] == kind]


def test_every_object_is_what_its_api_publishes(printed: list[dict[str, Any]]) -> None:
    for one in printed:
        kind = f"{one['apiVersion']} {one['kind']}"
        if kind in CUSTOM:
            assert faults(one["spec"], CUSTOM[kind], kind) == []
        else:
            kubernetes_validate.validate(one, VERSION, strict=True)
        assert one["metadata"]["namespace"] == "models"


def test_templates_of_custom_resources_are_pods(printed: list[dict[str, Any]]) -> None:
    found = list(pods(printed))
    assert len(found) == 2
    for template in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_wrong_object_would_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects("kubernetes", capsys=capsys)
    (nodes,) = of_kind(found, "StatefulSet")
    nodes["spec"]["template"]["spec"]["containers"][0]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(nodes, VERSION, strict=True)
    (scaled,) = of_kind(found, "ScaledObject")
    scaled["spec"]["maxReplicas"] = 3
    assert faults(scaled["spec"], CUSTOM["keda.sh/v1alpha1 ScaledObject"]) == [".maxReplicas"]


def test_pods_keep_the_restricted_standard(printed: list[dict[str, Any]]) -> None:
    for template in pods(printed):
        own = template["spec"]["securityContext"]
        assert own["runAsNonRoot"] is True and own["runAsUser"] > 0
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        sources = {key for volume in template["spec"]["volumes"] for key in volume if key != "name"}
        assert sources <= {"configMap", "secret", "persistentVolumeClaim", "emptyDir"}


def test_parts_name_each_other(printed: list[dict[str, Any]]) -> None:
    configs = {one["metadata"]["name"] for one in of_kind(printed, "ConfigMap")}
    accounts = {one["metadata"]["name"] for one in of_kind(printed, "ServiceAccount")}
    labels = [template["metadata"]["labels"].items() for template in pods(printed)]
    for template in pods(printed):
        spec = template["spec"]
        assert spec["serviceAccountName"] in accounts
        assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} == configs
        for container in spec["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for one in of_kind(printed, kind):
            chosen = one["spec"].get("selector", one["spec"].get("podSelector"))
            chosen = chosen.get("matchLabels", chosen)
            assert any(chosen.items() <= own for own in labels), one["metadata"]["name"]


def test_nodes_have_shared_memory_probes_and_a_drain(printed: list[dict[str, Any]]) -> None:
    (node,) = (one for one in pods(printed) if one["metadata"]["labels"]["app.kubernetes.io/component"] == "node")
    (container,) = node["spec"]["containers"]
    (shared,) = (volume for volume in node["spec"]["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (script,) = container["lifecycle"]["preStop"]["exec"]["command"]
    dockerfile = (PROJECT / "docker" / "Dockerfile").read_text()
    assert script == "/opt/shapeshift/drain.sh" and " docker/drain.sh /opt/shapeshift/\n" in dockerfile
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    assert int(given["DRAIN_S"]) + 20 < node["spec"]["terminationGracePeriodSeconds"]


def test_plain_nodes_find_each_other_by_dns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects("kubernetes", "--namespace", "models", capsys=capsys)
    (config,), (nodes,) = of_kind(found, "ConfigMap"), of_kind(found, "StatefulSet")
    own = source_of(config, tmp_path)
    assert isinstance(own, DnsSettings)
    (headless,) = (one for one in of_kind(found, "Service") if one["spec"].get("clusterIP") == "None")
    name = headless["metadata"]["name"]
    assert own.service == f"{name}.models.svc.cluster.local"
    assert nodes["spec"]["serviceName"] == name
    ports = {one["name"]: one["port"] for one in headless["spec"]["ports"]}
    assert ports == {"grpc": own.grpc_port, "metrics": own.metrics_port}
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one for one in container["env"]}
    # A pod's hostname is its name: what its address resolves to begins with it.
    assert own.names == HOSTNAME
    assert given[NODE_VARIABLE]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert given[FLEET_FILE_VARIABLE]["value"] == f"{mounts['fleet']}/fleet.toml"
    assert own.key_file == f"{mounts['keys']}/{{node}}"
    assert given["KEY_FILE"]["value"] == f"{mounts['keys']}/$({NODE_VARIABLE})"


def source_of(config: dict[str, Any], folder: Path) -> object:
    """Where the fleet file of a ConfigMap says that the nodes are."""
    (folder / "fleet.toml").write_text(config["data"]["fleet.toml"])
    return settings.read(folder / "fleet.toml").source


def test_the_file_of_ray_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects("kuberay", "--nodes", "3", "--gpus", "2", capsys=capsys)
    (config,) = of_kind(found, "ConfigMap")
    own = source_of(config, tmp_path)
    assert isinstance(own, RaySettings)
    (cluster,) = of_kind(found, "RayCluster")
    assert own.address == f"{cluster['metadata']['name']}-head-svc:6379", "KubeRay's name of the head's Service"
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert own.nodes == group["minReplicas"] == group["replicas"] == group["maxReplicas"] == 3
    # As many pods as nodes: none has room for two of them, the head for none.
    assert float(group["rayStartParams"]["num-cpus"]) == own.cpus > 0
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert own.gpus == 2.0
    (container,) = group["template"]["spec"]["containers"]
    mounts = [Path(one["mountPath"]) for one in container["volumeMounts"] if not one.get("readOnly")]
    for path in (own.build, own.folder):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"{path} can be written"
    (policy,) = of_kind(found, "NetworkPolicy")
    allowed = [one["ports"][0] for one in policy["spec"]["ingress"] if "ports" in one]
    ranges = [(port, port + 7) for port in (own.grpc_port, own.grpc_port + METRICS_OFFSET)]
    assert [(one["port"], one["endPort"]) for one in allowed] == ranges


def test_kustomize_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    assert main(["fleet", "manifests", "kubernetes"]) == 0
    (tmp_path / "base.yaml").write_text(capsys.readouterr().out)
    patch = [{"op": "add", "path": "/spec/template/spec/nodeSelector", "value": {"cpu": "amx"}}]
    kustomization = {
        "resources": ["base.yaml"],
        "images": [{"name": "shapeshift-triton", "newName": "registry.example/shapeshift", "newTag": "7"}],
        "patches": [{"target": {"kind": "StatefulSet"}, "patch": yaml.safe_dump(patch)}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True)
    changed = list(yaml.safe_load_all(done.stdout))
    (nodes,) = of_kind(changed, "StatefulSet")
    assert nodes["spec"]["template"]["spec"]["nodeSelector"] == {"cpu": "amx"}
    images = {container["image"] for template in pods(changed) for container in template["spec"]["containers"]}
    assert images == {"registry.example/shapeshift:7"}


def test_what_is_watched_exists(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects("kubernetes", capsys=capsys)
    (monitor,), (scaled,) = of_kind(found, "ServiceMonitor"), of_kind(found, "ScaledObject")
    (nodes,) = of_kind(found, "StatefulSet")
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (one for one in of_kind(found, "Service") if labels <= one["metadata"]["labels"].items())
    assert monitor["spec"]["endpoints"][0]["port"] in {one["name"] for one in service["spec"]["ports"]}
    (trigger,) = scaled["spec"]["triggers"]
    metric = trigger["metadata"]["query"].removeprefix("sum(").partition("{")[0]
    assert declared_metrics()[metric][0] == "gauge"
    assert trigger["metadata"]["threshold"] == "8"
    assert scaled["spec"]["scaleTargetRef"]["name"] == nodes["metadata"]["name"]
    # Two that set the number of replicas would undo each other.
    assert "replicas" not in nodes["spec"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Fleet"),
        ("name", "7"),
        ("name", "a" * 41),
        ("namespace", "a\nb"),
        ("image", 'x"'),
        ("ready_model", "../x"),
        ("cpu", "4 }"),
        ("memory", "16GB"),
        ("gpus", -1),
        ("nodes", 0),
        ("max_nodes", 1),
        ("prometheus", "http://x:9090\n- y"),
    ],
)
def test_an_invalid_value_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ManifestSettings(**{field: value})
    assert refused.value.field == ("model" if field == "ready_model" else field)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="one of kubernetes, kuberay"):
        render("helm", ManifestSettings())


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "manifests", "kubernetes", "--memory", "lots"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
