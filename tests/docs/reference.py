"""What pages say of the code, made from the code: `python -m tests.docs.reference` writes it into the pages.

A page has a marked place for each piece: `<!-- from the code: NAME -->`, the piece, `<!-- end -->`. A test fails where
what stands between the marks is not what the code gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.docs.docs_pages import PAGES, PROJECT
from tests.docs.docs_sources import PACKAGES, declared_metrics, imports, modules
from tests.docs.meanings import INPUTS, OUTPUTS, PACKAGES_HOLD, PARAMETERS

SETTINGS = {
    "text engines": "TextEngineSettings",
    "polymorph": "PolymorphSettings",
    "image engines": "ImageEngineSettings",
    "token_adapt": "TokenAdaptSettings",
    "fused_decode": "FusedDecodeSettings",
    "forwarding": "ForwardSettings",
    "adapters": "AdapterCacheSettings",
    "cascade": "CascadeSettings",
}
COMMANDS = {
    "serve": "shapeshift.cli.serve",
    "sidecar": "shapeshift.cli.sidecar",
    "status": "shapeshift.cli.running.status",
    "gateway": "shapeshift.cli.gateway",
    "live": "shapeshift.cli.running.live",
}
FRONTS = {
    "polymorph": "shapeshift.polymorph.front:TextFront",
    "token_adapt": "shapeshift.token_adapt.front:ImageFront",
    "fused_decode": "shapeshift.fused_decode.front:GenerateFront",
    "adapter_cache": "shapeshift.adapter_cache.front:LoraFront",
    "cascade": "shapeshift.cascade.front:CascadeFront",
}
SIGNATURES = {
    "polymorph": "shapeshift.polymorph.settings:front_signature",
    "token_adapt": "shapeshift.token_adapt.settings:signature",
    "fused_decode": "shapeshift.fused_decode.settings:signature",
    "cascade": "shapeshift.cascade.settings:signature",
}
# How Triton sends its codes: the gRPC status and that of /infer.
_STATUS = {
    "INVALID_ARG": ("INVALID_ARGUMENT", "400"),
    "NOT_FOUND": ("NOT_FOUND", "404"),
    "UNAVAILABLE": ("UNAVAILABLE", "503"),
    "UNSUPPORTED": ("UNIMPLEMENTED", "501"),
    "CANCELLED": ("CANCELLED", "400"),
    "INTERNAL": ("INTERNAL", "500"),
}
_MARKED = re.compile(r"<!-- from the code: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
Rows = Iterable[Sequence[str]]


def load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def settings_class(name: str) -> type:
    """The dataclass of this name, wherever the library declares it; or `module:name`."""
    if ":" in name:
        return load(name)
    declares = re.compile(rf"^class {name}\b", re.MULTILINE)
    (module,) = (module for module, path in modules("shapeshift").items() if declares.search(path.read_text()))
    return load(f"{module}:{name}")


def table(header: Sequence[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(_shown(cell) for cell in row)} |" for row in (header, *rows)]
    return "\n".join((lines[0], "|---" * len(header) + "|", *lines[1:]))


def _shown(cell: str) -> str:
    """A cell that Markdown shows as it is."""
    return re.sub(r"([|<])", r"\\\1", cell)


def documented(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of each field: `name, name  text`, with lines that go on."""
    fields = {field.name for field in dataclasses.fields(cls)}
    texts: dict[str, str] = {}
    current: list[str] = []
    for line in "\n".join(base.__doc__ or "" for base in reversed(cls.__mro__[:-1])).splitlines():
        start = re.match(r" {4}([a-z]\w*(?:, [a-z]\w*)*) +(\S.*)$", line)
        if start and {*start[1].split(", ")} <= fields:
            current = start[1].split(", ")
            texts |= dict.fromkeys(current, start[2])
        elif line.strip() and current:
            texts |= {name: f"{texts[name]} {line.strip()}" for name in current}
        else:
            current = []
    return texts


def _spelled_out(text: str, cls: type) -> str:
    """`text` with the members of a constant of a class's module in the place of its name."""
    constants = {
        name: value for base in reversed(cls.__mro__) for name, value in vars(sys.modules[base.__module__]).items()
    }
    return re.sub(
        r"\b[A-Z]{3,}\b", lambda word: ", ".join(constants[word[0]]) if word[0] in constants else word[0], text
    )


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
    if field.default in ("", None):
        return "none"
    value = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return f"`{value}`"


def settings(name_of_class: str, prefix: str = "") -> str:
    cls = settings_class(name_of_class)
    texts = documented(cls)
    rows = []
    for field in dataclasses.fields(cls):
        name = prefix + (field.name.replace("_", "-") if prefix else field.name)
        rows.append(
            (f"`{name}`", default_of(field), _spelled_out(texts.get(field.name) or field.metadata.get("help", ""), cls))
        )
    return table(("setting", "default", "meaning"), rows)


def options(module: str) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(module).add_arguments(parser)
    rows = []
    for action in (action for action in parser._actions if action.help != argparse.SUPPRESS):
        words = f" {action.metavar}" if isinstance(action.metavar, str) else ""
        default = (
            f"`{action.default}`" if action.default not in (None, "", []) and action.default is not False else "none"
        )
        text = (action.help or "").replace(" (%(default)s)", "").replace("%(default)s", str(action.default))
        rows.append((f"`{' '.join(action.option_strings[:1])}{words}`".replace("` ", "`"), default, text))
    return table(("option", "default", "meaning"), rows)


def metrics() -> str:
    rows = []
    for name, metric in declared_metrics().items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        by = ", ".join("all" if one == "serving" else one for one in metric.packages)
        rows.append((f"`{name}`", metric.kind, labels, by, metric.help[:1].lower() + metric.help[1:]))
    return table(("metric", "type", "further labels", "package", "meaning"), sorted(rows))


def errors() -> str:
    from shapeshift.serving import error_codes

    meanings: dict[str, list[str]] = {code: [] for code in error_codes.CODES if code != "OK"}
    for error, code in error_codes._CODES:
        meanings[code].append((error.__doc__ or "").splitlines()[0])
    meanings["INTERNAL"] = meanings["INTERNAL"] or ["Everything else: an engine failed, or a process has died."]
    rows = [(f"`{code}`", *_STATUS[code], " ".join(texts)) for code, texts in meanings.items()]
    return table(("code", "gRPC status", "HTTP", "when"), rows)


def parameters() -> str:
    from shapeshift.serving.parameters import COMMON

    takers: dict[str, list[str]] = {name: ["all"] for name in COMMON}
    for technique, target in FRONTS.items():
        for name in load(target).takes:
            takers.setdefault(name, []).append(technique)
    return table(
        ("parameter", "taken by", "meaning"),
        ((f"`{name}`", ", ".join(by), PARAMETERS.get(name, "")) for name, by in takers.items()),
    )


def tensors(technique: str, kind: str) -> str:
    signature = load(SIGNATURES[technique])({})
    meanings = INPUTS if kind == "inputs" else OUTPUTS
    rows = []
    for tensor in getattr(signature, kind):
        axes = ["n"] if signature.max_batch_size else []
        axes += [str(size) if size not in (-1, None) else "any" for size in tensor.dims]
        data_type = tensor.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
        shape = f"{data_type} [{', '.join(axes)}]"
        rows.append((f"`{tensor.name}`", shape, meanings[technique].get(tensor.name, "")))
    return table((kind.removesuffix("s"), "type and shape", "content"), rows)


def generation_inputs() -> str:
    from shapeshift.fused_decode import declarations

    meanings = INPUTS["fused_decode"]
    rows = (
        (f"`{one.name}`", f"{one.kind} [{one.shape}]", one.default, one.range, meanings.get(one.name, ""))
        for one in declarations.INPUTS
    )
    return table(("input", "type and shape", "default", "allowed", "meaning"), rows)


def generation_outputs() -> str:
    from shapeshift.fused_decode import declarations

    meanings = OUTPUTS["fused_decode"]
    rows = ((f"`{one.name}`", f"{one.kind} [{one.shape}]", meanings.get(one.name, "")) for one in declarations.OUTPUTS)
    return table(("output", "type and shape", "content"), rows)


def package(name: str) -> str:
    """The package of a dotted name: `shapeshift.x`, or `shapeshift` for a module at its top, or the top folder."""
    parts = name.split(".")
    if parts[0] == "shapeshift" and len(parts) > 1 and (PROJECT / "shapeshift" / parts[1]).is_dir():
        return f"shapeshift.{parts[1]}"
    return parts[0]


def packages() -> str:
    imported: dict[str, set[str]] = {}
    for module, path in modules("shapeshift", "backends").items():
        within = {package(name) for name in imports(path) if name.split(".")[0] in PACKAGES}
        imported.setdefault(package(module), set()).update(within - {package(module), "shapeshift"})
    rows = []
    for name, others in sorted(imported.items(), key=lambda item: (len(item[1]), item[0])):
        short = sorted(other.removeprefix("shapeshift.") for other in others)
        rows.append((f"`{name}`", PACKAGES_HOLD.get(name, ""), ", ".join(f"`{other}`" for other in short)))
    return table(("package", "what it holds", "imports"), rows)


def encoders() -> str:
    from shapeshift.engines.native.layouts import LAYOUTS
    from shapeshift.engines.text.families import FAMILIES

    def share(name: str, packs: bool) -> str:
        return "yes" if packs else "with `native`" if name in LAYOUTS else "no"

    rows = ((one.name, f"`{name}`", share(name, one.packs_rows)) for name, one in FAMILIES.items())
    return table(("family", "`model_type`", "texts share an engine call"), rows)


def decoders() -> str:
    from shapeshift.fused_decode.model.architecture import FAMILIES, from_config
    from tests.fused_decode.families import CONFIGS

    names: dict[str, list[str]] = {"one operation": [], "kernel by kernel": []}
    for name in FAMILIES:
        is_one = from_config({**CONFIGS[name], "model_type": name}).is_one_operation
        names["one operation" if is_one else "kernel by kernel"].append(f"`{name}`")
    rows = ((way, ", ".join(families)) for way, families in names.items())
    return table(("an iteration on a CPU", "`model_type`"), rows)


def images() -> str:
    from shapeshift.token_adapt.checkpoints import huggingface, timm
    from tests.token_adapt.vision_families import CASES

    names = {"architecture": timm.FAMILY} | {key: family.name for key, family in huggingface.FAMILIES.items()}
    compared: dict[str, list[str]] = {key: [] for key in names}
    for case in CASES:
        compared["architecture" if case.family == "timm" else case.family].append(case.variant)
    rows = ((name, f"`{key}`", ", ".join(compared[key])) for key, name in names.items())
    return table(("family", "`config.json`", "compared with its library"), rows)


def commands() -> str:
    from shapeshift.cli.main import COMMANDS as ALL

    return table(("command", "what it does"), ((f"`shapeshift {name}`", text) for name, (_, text) in ALL.items()))


def targets() -> str:
    found = re.findall(r"^([a-z-]+):.*?## (.+)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    return table(("target", "what it does"), ((f"`make {name}`", text.replace("$$", "$")) for name, text in found))


def gains() -> str:
    from bench.gains import read

    rows = (
        (
            f"[{gain.technique}](docs/{gain.technique}.md)",
            gain.what,
            f"**{gain.ratio:.2f}**",
            f"{gain.over}; {gain.other}",
        )
        for gain in read()
    )
    return table(("technique", "measure", "times", "over"), rows)


def claims(paper: str) -> str:
    from bench.papers import findings

    claimed = [one for one in findings.claims() if one.paper.lower() == paper and one.holds != findings.OTHER]
    rows = ((one.where, one.claim, one.ours, one.holds) for one in claimed)
    return table(("where", "the paper", "here", "reproduced"), rows)


def scale(where: str) -> str:
    from bench.papers import findings

    rows = findings.rows(where)
    return table(
        tuple(rows[0]),
        ([f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in row.values()] for row in rows),
    )


PIECES: dict[str, Callable[[], str]] = {
    **{f"settings of {name}": partial(settings, target) for name, target in SETTINGS.items()},
    **{f"options of {name}": partial(options, module) for name, module in COMMANDS.items()},
    **{f"{kind} of {name}": partial(tensors, name, kind) for name in SIGNATURES for kind in ("inputs", "outputs")},
    "inputs of fused_decode": generation_inputs,
    "outputs of fused_decode": generation_outputs,
    "request parameters": parameters,
    "errors": errors,
    "metrics": metrics,
    "packages": packages,
    "encoders": encoders,
    "decoders": decoders,
    "images": images,
    "commands": commands,
    "make targets": targets,
    "gains": gains,
    **{f"claims of {paper}": partial(claims, paper) for paper in ("arlo", "otas", "flover", "chameleon", "tabi")},
    **{f"{where} by workers": partial(scale, where) for where in ("latency", "cost")},
}


def pieces(page: Path) -> list[tuple[str, str]]:
    """The marked pieces of a page: name and text."""
    return [(match[1], match[2].rstrip("\n")) for match in _MARKED.finditer(page.read_text())]


def renewed(page: Path) -> str:
    """The page with what the code gives in its marked places."""
    return _MARKED.sub(
        lambda match: f"<!-- from the code: {match[1]} -->\n{PIECES[match[1]]()}\n<!-- end -->", page.read_text()
    )


def main() -> None:
    for page in PAGES:
        if pieces(page) and (text := renewed(page)) != page.read_text():
            page.write_text(text)
            sys.stdout.write(f"{page.relative_to(PROJECT)}: renewed\n")


if __name__ == "__main__":
    main()
