"""The files for a cluster: templates beside this module, with the values of a fleet."""

from __future__ import annotations

from pathlib import Path
from string import Template

from shapeshift.fleet.manifests.settings import ManifestSettings
from shapeshift.settings import require

KINDS = ("kubernetes", "kuberay")
_FOLDER = Path(__file__).parent / "templates"


def render(kind: str, settings: ManifestSettings) -> str:
    """The objects of a fleet as one YAML file. kind: one of KINDS; InvalidInputError for another."""
    require(kind in KINDS, "kind", kind, f"must be one of {', '.join(KINDS)}")
    text = (_FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(settings.values())
