"""`shapeshift policy`: compute one decision with the function that the servers use."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.policy_api import Policy

# One module for each technique, with a list POLICIES.
TECHNIQUES = (
    "shapeshift.polymorph.policy.api",
    "shapeshift.token_adapt.policy.api",
    "shapeshift.fused_decode.policy.api",
    "shapeshift.adapter_cache.policy.api",
    "shapeshift.cascade.policy.api",
)


def policies() -> dict[str, Policy]:
    """All policies by name."""
    tables = (importlib.import_module(name).POLICIES for name in TECHNIQUES)
    return {policy.name: policy for table in tables for policy in table}


def evaluate(name: str, inputs: Any) -> Any:
    """The decision of policy `name` for one input object, or a list of decisions for a list of them.

    Raises NotFoundError for an unknown name, InvalidInputError for an invalid field.
    """
    table = policies()
    if name not in table:
        raise NotFoundError(f"policy: no {name!r}; known: {', '.join(sorted(table))}")
    if isinstance(inputs, list):
        return [table[name].evaluate(item) for item in inputs]
    return table[name].evaluate(inputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift policy`."""
    parser.add_argument("name", nargs="?", help="name of the policy")
    parser.add_argument("--input", metavar="FILE", help="one JSON object or a list of them; - for stdin")
    parser.add_argument("--list", action="store_true", help="list all policies")


def run(options: argparse.Namespace) -> int:
    """Write the answer to standard output, in the form of the input."""
    if options.list:
        for name, policy in sorted(policies().items()):
            sys.stdout.write(f"{name:24} {policy.summary}\n")
        return 0
    if not options.name or not options.input:
        raise InvalidInputError("policy", options.name, "must be NAME --input FILE, or --list")
    sys.stdout.write(json.dumps(evaluate(options.name, _load(options.input))) + "\n")
    return 0


def _load(source: str) -> Any:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        raise InvalidInputError("input", source, f"must be a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError("input", source, f"must be UTF-8 text ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("input", source, f"must be JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise InvalidInputError(duplicate, duplicate, "each key may appear only once")
    return values
