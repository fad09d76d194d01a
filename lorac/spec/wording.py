"""pydantic's findings as plain sentences. The JSON schema of Spec says what would have been right."""

import re
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from lorac.errors import Problem

from .backend import ARGUMENT
from .model_schema import DOTTED_PATH, LAYER_NAME
from .schema import CARDS, IDENTIFIER

_PATTERNS = {
    IDENTIFIER: "a name of at most 41 lower-case letters, digits and _, beginning with a letter",
    LAYER_NAME: "a name of at most 61 lower-case letters, digits and _, beginning with a letter",
    DOTTED_PATH: "names joined by dots",
    ARGUMENT: "*ELEMENT (a pointer), i32, i64 or fp32 (a number), or tile<ELEMENT>[ROWS, COLUMNS]; "
    "ELEMENT is dtype, fp32, fp16, bf16, i32 or i64",
}
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "a mapping",
}
_MEANT = "did you mean "
_BOOL_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}

Path = tuple[str | int, ...]
Node = dict[str, Any]


def problems_of(error: ValidationError, model: type[BaseModel], whole: str = "the spec") -> list[Problem]:
    """Every finding; messages call what was read `whole`."""
    schema = _schema(model)
    # pydantic counts the items of a list that are valid: one that is not is told by itself
    items = [item for item in error.errors(include_url=False) if not _is_long_enough(item)]
    found = [_problem(item, schema, whole) for item in items]
    meant = {(*problem.path[:-1], problem.hint[len(_MEANT) : -1]) for problem in found if _MEANT in problem.hint}
    # A misspelt key is reported once, not again as the key that it leaves missing
    kinds = [item["type"] for item in items]
    return [one for one, kind in zip(found, kinds, strict=True) if kind != "missing" or one.path not in meant]


def nearest(word: Any, known: list[str]) -> str:
    """A hint naming the known word that `word` was probably meant to be, or nothing."""
    match = get_close_matches(str(word).lower(), known, n=1, cutoff=0.6)
    return f"{_MEANT}{match[0]}?" if match else ""


def label(path: Path, whole: str) -> str:
    """How messages name a place: the last key, and the index of a list's item; without a key, the `whole`."""
    if not path:
        return whole
    if isinstance(path[-1], int) and len(path) > 1 and isinstance(path[-2], str):
        return f"{path[-2]}[{path[-1]}]"
    return str(path[-1])


def shown(value: Any) -> str:
    """How messages repeat a value the user wrote."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    return {list: "a list", dict: "a mapping"}.get(type(value), str(value))


@cache
def _schema(model: type[BaseModel]) -> Node:
    return model.model_json_schema()


def _is_long_enough(item: Any) -> bool:
    return item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]


def _problem(item: Any, schema: Node, whole: str) -> Problem:
    kind, path, value = item["type"], tuple(item["loc"]), item["input"]
    if kind == "missing":
        node = _node(schema, path, schema)
        message = f"{label(path[:-1], whole)} lacks the key {path[-1]}"
        return Problem(message, path, expected=f"{path[-1]}: {_phrase(node, schema)}")
    if kind in ("extra_forbidden", "invalid_key"):
        known = list(_node(schema, path[:-1], schema).get("properties", {}))
        message = f"unknown key {path[-1]} in {label(path[:-1], whole)}"
        expected = f"one of {', '.join(known)}" if known else "a text"
        return Problem(message, path, expected=expected, hint=nearest(path[-1], known), at_key=True)
    if path[-1:] == ("[key]",):
        pattern = next(iter(_node(schema, path[:-2], schema).get("patternProperties", {"": None})))
        message = f"{shown(value)} cannot be a name in {label(path[:-2], whole)}"
        return Problem(message, path[:-1], expected=_PATTERNS.get(pattern, "a text"), at_key=True)
    node = _node(schema, path, schema)
    return Problem(_sentence(item, path, node, whole), path, _phrase(node, schema), _hint(value, node, schema))


def _sentence(item: Any, path: Path, node: Node, whole: str) -> str:
    kind, value, limits = item["type"], item["input"], item.get("ctx", {})
    name = label(path, whole)
    if kind in ("greater_than_equal", "less_than_equal", "less_than"):
        if node.get("minimum") == node.get("maximum"):
            return f"{name} must be {node['minimum']}, not {shown(value)}"
        bound = f"at least {limits['ge']:g}" if "ge" in limits else f"at most {limits.get('le', node.get('maximum'))}"
        return f"{name} must be {bound}, not {shown(value)}"
    if kind == "finite_number":
        return f"{name} must be finite"
    if kind == "too_short" and not value:
        return f"{name} must not be empty"
    if kind in ("too_short", "too_long"):
        return f"{name} must have {limits.get('min_length') or limits.get('max_length')} items, not {len(value)}"
    if kind in ("literal_error", "string_pattern_mismatch"):
        return f"{name} cannot be {shown(value)}"
    text = "the text " if isinstance(value, str) else ""
    return f"{name} must be {_KINDS.get(node.get('type', ''), 'something else')}, not {text}{shown(value)}"


def _hint(value: Any, node: Node, schema: Node) -> str:
    kind = node.get("type")
    if node.get("enum") == list(CARDS):
        return _target_hint(str(value))
    if "enum" in node:
        return nearest(value, list(map(str, node["enum"])))
    if kind == "boolean" and value in ("true", "false"):
        return f"write {value}, without quotes"
    if kind == "boolean" and str(value).lower() in _BOOL_WORDS:
        return f"write {_BOOL_WORDS[str(value).lower()]}: YAML 1.2 knows no yes, no, on, off"
    if kind in ("integer", "number") and isinstance(value, str):
        digits = value.replace("_", "").strip()
        if digits.isdecimal() and digits.isascii():
            return f"write {digits.lstrip('0') or '0'}, without quotes or underscores"
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"write {value:.0f}"
    if kind == "string" and isinstance(value, (bool, int, float)):
        return f'quote it: "{shown(value)}"'
    if kind == "array" and isinstance(value, (str, int)):
        return _list_hint(value, _plain(node["items"], schema))
    if kind == "object" and value is None:
        return "write {} for none"
    return ""


def _target_hint(text: str) -> str:
    """The target a card is of, or one in other letters. Its digits alone mean nothing: an H100 is no sm_100."""
    words = f" {re.sub(r'[^a-z0-9]+', ' ', text.lower())} "
    for target, cards in CARDS.items():
        if card := next((card for card in cards if f" {card.lower()} " in words), None):
            return f"{card} is {target}"
        if words.replace(" ", "") == target.replace("_", ""):
            return f"{_MEANT}{target}?"
    return ""


def _list_hint(value: str | int, item: Node) -> str:
    """How a list with the value is written, where it may hold that; what texts name, the schema does not know."""
    if "enum" in item:
        return f"write [{value}]" if value in item["enum"] else ""
    if item.get("type") == "string":
        return "write a list: [one, two]" if isinstance(value, str) else ""
    within = type(value) is int and item.get("minimum", value) <= value <= item.get("maximum", value)
    return f"write [{value}]" if within else ""


def _node(node: Node, loc: Path, schema: Node) -> Node:
    """The part of the schema that describes the value at `loc`; an empty node where the schema says nothing."""
    node = _plain(node, schema)
    for step in loc:
        if isinstance(step, int):
            node = node.get("items", {})
        else:
            named = node.get("properties", {}).get(step)
            node = named or next(iter(node.get("patternProperties", {}).values()), {})
        node = _plain(node, schema)
    return node


def _plain(node: Node, schema: Node) -> Node:
    """The node with its reference resolved and `or null` dropped."""
    for option in node.get("anyOf", []):
        if option.get("type") != "null":
            return _plain({**option, **{k: v for k, v in node.items() if k != "anyOf"}}, schema)
    if "$ref" in node:
        target = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        return {**target, **{k: v for k, v in node.items() if k != "$ref"}}
    return node


def _phrase(node: Node, schema: Node) -> str:
    kind = node.get("type", "")
    text = _KINDS.get(kind, "")
    low, high = node.get("minimum"), node.get("maximum", node.get("exclusiveMaximum", 0) - 1)
    if "enum" in node:
        text = f"one of {', '.join(map(str, node['enum']))}"
    elif node.get("pattern") in _PATTERNS:
        text = _PATTERNS[node["pattern"]]
    elif low is not None and low == high:
        text = str(low)
    elif low is not None:
        text += f" from {low} to {high}" if high >= low else f" of at least {low:g}"
    elif kind == "array":
        item = _plain(node["items"], schema)
        text = "a list, each item " + _phrase({k: v for k, v in item.items() if k != "description"}, schema)
    return f"{text}: {node['description']}" if node.get("description") else text
