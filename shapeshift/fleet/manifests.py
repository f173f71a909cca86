"""The files of a fleet for a Kubernetes cluster: templates, with the values in which clusters differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

from shapeshift.fleet.settings import METRICS_OFFSET, RaySettings
from shapeshift.settings import require
from shapeshift.triton.names import check_model_name

KINDS = ("kubernetes", "kuberay")
_FOLDER = Path(__file__).parent / "templates"
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:@-]{0,254}")
_QUANTITY = re.compile(r"[1-9][0-9]*(m|Ki|Mi|Gi|Ti)?")
_URL = re.compile(r"https?://[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9./_-]*)?")
# Names of Services begin with a letter. Names are prefixes of others, such as those of pods: 63 characters at most.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def _field(default: Any, text: str) -> Any:
    """A field with its help on the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ManifestSettings:
    """The values that the files differ in. Raises InvalidInputError with the name of the field."""

    name: str = _field("shapeshift", "of the fleet; every object's name begins with it")
    namespace: str = _field("default", "of all objects")
    image: str = _field("shapeshift-triton", "built from docker/Dockerfile")
    ready_model: str = _field("encode", "a node takes requests once it has loaded this model")
    nodes: int = _field(2, "with which the fleet starts, and below which it never falls")
    max_nodes: int = _field(8, "most nodes of plain Kubernetes, whose number follows the load")
    cpu: str = _field("4", "of a node")
    memory: str = _field("16Gi", "of a node, /dev/shm included")
    gpus: int = _field(0, "of a node")
    prometheus: str = _field(
        "http://prometheus-operated.monitoring.svc:9090", "URL that KEDA asks for the requests that wait"
    )

    def __post_init__(self) -> None:
        for name in ("name", "namespace"):
            value = getattr(self, name)
            require(bool(_NAME.fullmatch(value)), name, value, "must be a-z, 0-9 and -, a letter first, at most 40")
        require(bool(_IMAGE.fullmatch(self.image)), "image", self.image, "must be the reference of an image")
        check_model_name(self.ready_model)
        for name in ("cpu", "memory"):
            value = getattr(self, name)
            require(bool(_QUANTITY.fullmatch(value)), name, value, "must be a quantity such as 500m, 4 or 16Gi")
        require(1 <= self.nodes <= 1000, "nodes", self.nodes, "must be 1 to 1000")
        allowed = f"must be nodes ({self.nodes}) to 1000"
        require(self.nodes <= self.max_nodes <= 1000, "max_nodes", self.max_nodes, allowed)
        require(0 <= self.gpus <= 64, "gpus", self.gpus, "must be 0 to 64")
        require(bool(_URL.fullmatch(self.prometheus)), "prometheus", self.prometheus, "must be http[s]://HOST[:PORT]")

    def values(self) -> dict[str, str]:
        """What stands for each placeholder of a template."""
        values = {one.name: str(getattr(self, one.name)) for one in fields(self)}
        ports = {"grpc_port": RaySettings.grpc_port, "metrics_port": RaySettings.grpc_port + METRICS_OFFSET}
        last = {f"last_{name}": str(port + self.max_nodes - 1) for name, port in ports.items()}
        values |= {name: str(port) for name, port in ports.items()} | last
        return {**values, "gpu_limit": f', nvidia.com/gpu: "{self.gpus}"' if self.gpus else ""}


def render(kind: str, settings: ManifestSettings) -> str:
    """The objects of a fleet as one YAML file. kind: one of KINDS; InvalidInputError for another."""
    require(kind in KINDS, "kind", kind, f"must be one of {', '.join(KINDS)}")
    text = (_FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(settings.values())
