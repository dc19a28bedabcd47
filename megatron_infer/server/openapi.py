"""/openapi.json: every registered operation with its body's schema and its statuses."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from megatron_infer import __version__
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.inactive_fields import FieldTable
from megatron_infer.server.routes import Operation, Routes
from megatron_infer.server.server_config import ServerConfig

EXTENSION = "x-fields-without-action"
"""Key of a component's fields of `inactive_fields`, with the values that ask for nothing."""
REFERENCE = "#/components/schemas/{name}"


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    type: Literal["error"]
    error: ErrorObject


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def document(call: Call) -> Reply:
        return Reply(describe(routes, settings, client.model_names))

    routes.add("GET", "/openapi.json", document, "This document")


def describe(routes: Routes, settings: ServerConfig, model_names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document of all operations, with the limits of this server and the names of its model."""
    has_key = settings.api_key is not None
    bodies = {key: routes.body_of(operation) for key, operation in routes.operations.items()}
    types = [body for body in bodies.values() if body is not None]
    _, components = msgspec.json.schema_components([*types, ErrorReply], ref_template=REFERENCE)
    for component in components.values():
        _put_limits(component, settings)
        _put_model_names(component, model_names)
    tables: dict[str, list[FieldTable]] = {}
    paths: dict[str, Any] = {}
    for (path, method), operation in routes.operations.items():
        body = bodies[path, method]
        schema = None if body is None else _reference(components, tables, body.__name__, operation.fields)
        shown = paths.setdefault(re.sub(r":\w+\}", "}", path), {})
        shown[method.lower()] = _operation(operation, schema, has_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "megatron-infer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _reference(
    components: dict[str, Any], tables: dict[str, list[FieldTable]], name: str, fields: FieldTable
) -> dict[str, str]:
    """A reference to the component of a body: each table of fields without an action has its own component.

    tables: name of the body -> its tables that have a component.
    """
    known = tables.setdefault(name, [])
    is_new = fields not in known
    if is_new:
        known.append(fields)
    number = known.index(fields)
    own = name if number == 0 else f"{name}{number + 1}"
    if is_new:
        if number:
            components[own] = copy.deepcopy(components[name])
        _put_fields(components, own, fields)
    return {"$ref": REFERENCE.format(name=own)}


def _put_fields(components: dict[str, Any], name: str, table: FieldTable) -> None:
    """Put the fields without an action into a component, and into those of its fields that have a table.

    A null field counts as not given, whatever its name.
    """
    component = components[name]
    properties = component.get("properties", {})
    component["additionalProperties"] = {"type": "null"}
    component[EXTENSION] = {
        field_name: {
            "effect": "refused" if rule.is_refused else "none",
            "unset": [*rule.unset, None],
            "description": rule.reason,
        }
        for field_name, rule in table.rules.items()
        if field_name not in properties
    }
    for field_name, inner in table.nested.items():
        if inner.kinds:
            _put_other_kinds(properties.get(field_name, {}), inner.kinds)
        for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(properties.get(field_name))):
            _put_fields(components, reference, inner)


def _put_other_kinds(values: dict[str, Any], kinds: Sequence[str]) -> None:
    """Allow objects of another `type` in a list, which are left out, see `FieldTable.kinds`."""
    other = {
        "type": "object",
        "properties": {"type": {"type": "string", "not": {"enum": [*kinds]}}},
        "required": ["type"],
    }
    for choice in (values, *values.get("anyOf", ())):
        if "items" in choice and other not in choice["items"].get("anyOf", ()):
            choice["items"] = {"anyOf": [choice["items"], other]}


def _put_limits(component: dict[str, Any], settings: ServerConfig) -> None:
    """Put this server's limits in place of the types' own maxima."""
    limits = {"n": settings.max_n, "best_of": settings.max_n}
    limits |= dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), settings.max_logprobs)
    for name, limit in limits.items():
        for choice in component.get("properties", {}).get(name, {}).get("anyOf", ()):
            if "maximum" in choice:
                choice["maximum"] = min(choice["maximum"], limit)


def _put_model_names(component: dict[str, Any], names: Sequence[str]) -> None:
    """Restrict `model` to the served names."""
    for choice in component.get("properties", {}).get("model", {}).get("anyOf", ()):
        if choice.get("type") == "string":
            choice["enum"] = [*names, ""]


def _operation(operation: Operation, schema: Any, has_key: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(name="ErrorReply")}}}
    statuses = {*operation.statuses, *((400, 413, 415, 503) if schema is not None else ())}
    statuses |= {401} if has_key and not operation.open else set()
    replies: dict[str, Any] = {str(status): {"description": "refused", "content": error} for status in sorted(statuses)}
    replies["200"] = {"description": "done", "content": {name: {} for name in operation.media_types}}
    if operation.path.endswith(("health", "/ping", "/ready")):
        replies["503"] = replies["200"] | {"description": "not serving"}
    shown: dict[str, Any] = {"summary": operation.summary, "responses": replies}
    names = re.findall(r"\{(\w+)", operation.path)
    if names:
        shown["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        shown["requestBody"] = {
            "required": not operation.optional_body,
            "content": {"application/json": {"schema": schema}},
        }
    if has_key and not operation.open:
        shown["security"] = [{"key": []}]
    return shown
