"""`shapeshift policy`: take one decision by hand, with the function that serves."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.policy import Policy

# One module a technique, each with a table POLICIES.
TECHNIQUES = (
    "shapeshift.polymorph.policies",
    "shapeshift.token_adapt.policies",
    "shapeshift.fused_decode.policies",
    "shapeshift.adapter_cache.policies",
    "shapeshift.cascade.policies",
)


def policies() -> dict[str, Policy]:
    """All policies by name."""
    tables = (importlib.import_module(name).POLICIES for name in TECHNIQUES)
    return {policy.name: policy for table in tables for policy in table}


def answer(name: str, given: Any) -> Any:
    """The decision of policy `name` for one input object, or a list of decisions for a list of them.

    Raises NotFoundError for an unknown name, InvalidInputError for an input that its fields refuse.
    """
    known = policies()
    if name not in known:
        raise NotFoundError(f"policy: no {name!r}; known: {', '.join(sorted(known))}")
    if isinstance(given, list):
        return [known[name].answer(item) for item in given]
    return known[name].answer(given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shapeshift policy`."""
    parser.add_argument("name", nargs="?", help="which policy")
    parser.add_argument("--input", metavar="FILE", help="one JSON object or a list of them; - for stdin")
    parser.add_argument("--list", action="store_true", help="name all policies")


def run(options: argparse.Namespace) -> int:
    """Write the answer to standard output, in the form of the input."""
    if options.list:
        for name, policy in sorted(policies().items()):
            sys.stdout.write(f"{name:24} {policy.summary}\n")
        return 0
    if not options.name or not options.input:
        raise InvalidInputError("policy", options.name, "NAME --input FILE, or --list")
    sys.stdout.write(json.dumps(answer(options.name, _load(options.input))) + "\n")
    return 0


def _load(source: str) -> Any:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        raise InvalidInputError("input", source, f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError("input", source, f"UTF-8 text ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("input", source, f"JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidInputError(twice, twice, "a key may stand only once")
    return made
