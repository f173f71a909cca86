"""`shapeshift fleet manifests`: the files for a Kubernetes cluster."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from shapeshift.fleet.manifests.render import KINDS, render
from shapeshift.fleet.manifests.settings import ManifestSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet manifests`: the fields of ManifestSettings."""
    parser.add_argument("kind", choices=KINDS, help="plain Kubernetes, or KubeRay")
    for field in fields(ManifestSettings):
        option = f"--{field.name.replace('_', '-')}"
        kind = type(field.default)
        text = f"{field.metadata['help']} (%(default)s)"
        parser.add_argument(option, type=kind, default=field.default, help=text)


def run(options: argparse.Namespace) -> int:
    """Write the file to standard output. Raises InvalidInputError with the name of the field."""
    given = {field.name: getattr(options, field.name) for field in fields(ManifestSettings)}
    sys.stdout.write(render(options.kind, ManifestSettings(**given)))
    return 0
