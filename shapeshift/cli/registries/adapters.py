"""`shapeshift adapters`: list and change the LoRA adapters of a model, also while it serves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shapeshift import settings
from shapeshift.adapter_cache.registry import store
from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.build_engines.hub.sources import find_adapter
from shapeshift.cli.registries import front_model
from shapeshift.cli.stop_signals import stop_on_sigterm
from shapeshift.errors import NO_ADAPTER, NotFoundError
from shapeshift.fused_decode.settings import COMPUTED_BYTES, computed
from shapeshift.progress import warn
from shapeshift.registry import FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shapeshift adapters`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="check and register a PEFT adapter; replaces one of the same name")
    add.add_argument("name", help="the name that requests use")
    add.add_argument(
        "source",
        help="folder with adapter_config.json and adapter_model.safetensors, or hub id: owner/adapter@revision",
    )
    add.add_argument("--pin", action="store_true", help="load it now and keep it loaded")
    listing = actions.add_parser("list", help=f"list the adapters of the registry and of {store.MULTI_LORA}")
    listing.add_argument("--json", action="store_true", help="write one JSON object")
    pin = actions.add_parser("pin", help="load it now and keep it loaded")
    pin.add_argument("name")
    pin.add_argument("--off", action="store_true", help="unpin it")
    remove = actions.add_parser("remove", help="refuse new requests for it; waiting and running requests are served")
    remove.add_argument("name")
    front_model.add_arguments(parser, (add, listing, pin, remove), "generate_lora")


def run(options: argparse.Namespace) -> int:
    """Change the registry, or write it to standard output. Returns `NO_ADAPTER` for a name that is not registered.

    Raises ShapeshiftError for invalid options.
    """
    model, values = front_model.read(options)
    if "adapters_dir" not in values:
        raise NotFoundError(f"model: {options.model} serves no adapters")
    folder = front_model.registry_folder(options, model, values, "adapters_dir")
    fixed = store.read_multi_lora(model / "1")
    if options.action == "list":
        _list(store.read(folder), fixed, options.json)
        return 0
    with stop_on_sigterm("adapters"):
        try:
            _change(options, folder, fixed, model, values)
        except NotFoundError as error:
            if options.action == "add":
                raise
            warn(f"shapeshift adapters: {error}")
            return NO_ADAPTER
    sys.stdout.write(f"{options.name}: {_DONE[options.action]}; a running server applies it within two seconds\n")
    return 0


_DONE = {"add": "registered", "pin": "changed", "remove": "removed"}


def _change(
    options: argparse.Namespace, folder: Path, fixed: Mapping[str, Path], model: Path, values: dict[str, str]
) -> None:
    allowed = f"not a name of {store.MULTI_LORA}, which is read when the model is loaded"
    settings.require(options.name not in fixed, "name", options.name, allowed)
    if options.action == "add":
        store.check_name(options.name)
        source = find_adapter(options.source, options.build)
        base = _check(source.folder, model, values)
        store.add(folder, options.name, source.folder, options.pin, base, source.origin)
    elif options.action == "pin":
        store.pin(folder, options.name, not options.off)
    else:
        store.remove(folder, options.name)


def _check(folder: Path, model: Path, values: dict[str, str]) -> str:
    """Raise the error with which a server would refuse the adapter in `folder`.

    Returns the hash of the checkpoint that it was checked against; empty if the front states none.
    """
    # These import torch, which the other actions do not need.
    from shapeshift.adapter_cache.memory.adapter_table import make_adapter
    from shapeshift.adapter_cache.registry import peft

    cache, precision = settings.read(AdapterSettings, values), values["precision"]
    checkpoint = (model / values["checkpoint"]).resolve()
    names = {checkpoint.name, str(checkpoint), *filter(None, cache.base_names.split(","))}
    sha256 = values.get("checkpoint_sha256", "")
    if "engines" in values:
        from shapeshift.adapter_cache.text.base import base_model

        base = base_model(model / values["engines"], names, cache.max_rank, checkpoint, sha256)
    else:
        from shapeshift.fused_decode.model.architecture import Architecture

        base = peft.BaseModel.of_decoder(Architecture.read(checkpoint), names, cache.max_rank, checkpoint, sha256)
    adapter = peft.read(folder, base)
    peft.require_finite(adapter)
    size = make_adapter("", "", adapter, COMPUTED_BYTES[computed(precision)]).info.bytes
    settings.require(
        size <= cache.adapter_mb << 20, "adapter", f"{size} bytes", f"at most adapter_mb ({cache.adapter_mb})"
    )
    return sha256


def _list(entries: dict[str, store.Entry], fixed: dict[str, Path], as_json: bool) -> None:
    shown = {name: {**asdict(entry), "from": FILE} for name, entry in entries.items()}
    shown |= {name: {"folder": str(folder), "from": store.MULTI_LORA} for name, folder in fixed.items()}
    if as_json:
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    for name, entry in sorted(shown.items()):
        about = store.MULTI_LORA if name in fixed else f"{str(entry['sha256'])[:12]} {entry['origin']}".rstrip()
        sys.stdout.write(f"{name:32} {'pinned' if entry.get('pinned') else '-':7} {about}\n")
