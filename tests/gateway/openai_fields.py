"""Names and types of the request fields in OpenAI's published OpenAPI file: `openai_fields.json` is what this prints.

`python -m tests.gateway.openai_fields FILE COMMIT`, with openapi.json of https://github.com/openai/openai-openapi.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = "https://github.com/openai/openai-openapi"
ROUTES = ("/chat/completions", "/completions", "/embeddings")
EXTRACT = Path(__file__).with_suffix(".json")
_EVERY = ("array", "boolean", "integer", "null", "number", "object", "string")


def types_of(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows; of one that states none, all."""
    if "$ref" in schema:
        return types_of(_referred(schema["$ref"], document), document)
    found: set[str] = set()
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= types_of(choice, document)
    for part in schema.get("allOf", ()):
        found |= types_of(part, document)
    stated = schema.get("type", ())
    found |= {stated} if isinstance(stated, str) else {*stated}
    if "const" in schema or ("enum" in schema and not found):
        found |= {"string" if isinstance(one, str) else "null" for one in schema.get("enum", [schema.get("const")])}
    if schema.get("nullable"):
        found.add("null")
    return found or {*_EVERY}


def fields(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each field of an object, and its types."""
    if "$ref" in schema:
        yield from fields(_referred(schema["$ref"], document), document)
    for part in schema.get("allOf", ()):
        yield from fields(part, document)
    for name, own in schema.get("properties", {}).items():
        yield name, sorted(types_of(own, document))


def _referred(reference: str, document: dict[str, Any]) -> dict[str, Any]:
    found: Any = document
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return dict(found)


def main() -> None:
    """Print the extract."""
    file, commit = sys.argv[1:]
    document = json.loads(Path(file).read_text())
    found: dict[str, Any] = {"source": SOURCE, "commit": commit, "version": document["info"]["version"]}
    for route in ROUTES:
        body = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        found[route] = dict(sorted(fields(body, document)))
    print(json.dumps(found, indent=1).replace('[\n   "', '["').replace('",\n   "', '", "').replace('"\n  ]', '"]'))


if __name__ == "__main__":
    main()
