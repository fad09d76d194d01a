"""The JSON schema of specs, for editors: `# yaml-language-server: $schema=schema.json` names it."""

import json
from typing import Any

from .schema import Spec

_HEAD = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "lorac spec"}


def json_schema() -> str:
    """The schema as stable, indented JSON text that ends in a newline."""
    return json.dumps(_HEAD | _untitled(Spec.model_json_schema()), indent=2) + "\n"


def _untitled(node: Any) -> Any:
    """pydantic titles every field with its name in other letters; only text that says more is kept."""
    if isinstance(node, list):
        return [_untitled(item) for item in node]
    if not isinstance(node, dict):
        return node
    # A field called title is a mapping; the annotation is a text
    return {key: _untitled(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
