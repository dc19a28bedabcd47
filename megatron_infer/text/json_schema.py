"""JSON schemas without what asks for nothing, which llguidance takes for a keyword that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_infer.config.structured_output import FORMATS

Node = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
_PARTS = (
    "items", "prefixItems", "additionalItems", "contains", "unevaluatedItems", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
"""Keywords that hold a schema, or a list of schemas."""
_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)


def plain(schema: Any) -> Any:
    """An equivalent schema without annotations, and without keywords at values by which they allow everything.

    `format` is an annotation but for FORMATS (JSON Schema 2020-12, validation, 7.2.1). `not: {}` is false.
    """
    return _rewritten(schema, _plain_node)


def _rewritten(schema: Any, change: Callable[[Node], Any]) -> Any:
    """The schema with `change` applied to each object that is a schema, inner ones first."""
    if isinstance(schema, list):
        return [_rewritten(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    node: Node = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            value = {name: _rewritten(one, change) for name, one in value.items()}
        elif key in _PARTS:
            value = _rewritten(value, change)
        node[key] = value
    return change(node)


def _plain_node(node: Node) -> Any:
    kept = {key: value for key, value in node.items() if not _allows_everything(key, value)}
    return False if kept.get("not") in ({}, True) else kept


def _allows_everything(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "propertyNames":
        return value in ({}, {"type": "string"}, True)
    return key in _ANNOTATIONS or (key in ("uniqueItems", "not") and value is False)
