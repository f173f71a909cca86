"""Objects held against the fields that an API publishes: for kinds whose schema no package has."""

from __future__ import annotations

from typing import Any


def faults(value: Any, schema: Any, path: str = "") -> list[str]:
    """Where `value` is not what `schema` says.

    schema: a type; a list with the schema of each item; or those of an object's fields by name, a star behind the
    names that have to be there.
    """
    if isinstance(schema, type):
        return [] if isinstance(value, schema) else [f"{path}: {value!r}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{path}: no list"]
        return [fault for place, one in enumerate(value) for fault in faults(one, schema[0], f"{path}[{place}]")]
    fields = {name.rstrip("*"): own for name, own in schema.items()}
    missing = [name for name in schema if name.endswith("*") and name.rstrip("*") not in value]
    unknown = [name for name in value if name not in fields]
    found = [f"{path}.{name}" for name in (*missing, *unknown)]
    return found + [
        fault for name in value if name in fields for fault in faults(value[name], fields[name], f"{path}.{name}")
    ]
