"""Writes docs/request_fields.md from the tables of request fields that have no action here.

    python tools/field_docs.py [ROOT]

A test holds the page to what this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_infer.server.app import registered_routes
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.inactive_fields import NO_FIELDS, FieldTable, Rule
from megatron_infer.server.server_config import ServerConfig

DOCS = Path("docs/request_fields.md")
HEAD = """# Request fields without an action

A field of a client does nothing, or is a 400? The reply's header `x-ignored-fields` or the error names the field.
The table of the route below has the reason. One policy holds on every route:

* A field at its default, and a null in any field, is taken.
* A field that changes nothing here is taken with any value and named in the reply's header `x-ignored-fields`;
  `--strict-fields` refuses it.
* A field that would change the answer and cannot act is a 400 that names it and says what to do.
* A field that is not known is a 400 with the nearest name.

`GET /openapi.json` has the fields that act, with their types. The others are below: written by
`python tools/field_docs.py` from `megatron_infer/server/field_tables.py` and the tables of the routes, and held to it
by a test.

## Shared fields

These hold on {routes}, unless a field acts on the route or the table of the route has another row for the field.
"""
COLUMNS = "\n| field | taken and not named | else | |\n|---|---|---|---|"


def tables() -> dict[str, FieldTable]:
    """Routes, with ", " between those of one table -> their table, in the order of registration."""
    settings = ServerConfig(control=True)
    coordinator: Any = SimpleNamespace()
    routes = registered_routes(EngineClient(coordinator, None, settings, model="model"), settings)
    found: dict[int, tuple[FieldTable, dict[str, None]]] = {}
    for operation in routes.operations.values():
        if operation.fields is not NO_FIELDS:
            found.setdefault(id(operation.fields), (operation.fields, {}))[1][operation.path] = None
    return {", ".join(paths): table for table, paths in found.values()}


def page() -> str:
    shown = tables()
    sharing = [_named(routes) for routes, table in shown.items() if SHARED.keys() <= table.rules.keys()]
    parts = [HEAD.replace("{routes}", ", ".join(sharing)) + COLUMNS, *_rows(FieldTable(SHARED), "", {})]
    for routes, table in shown.items():
        own = list(_rows(table, "", SHARED))
        if own:
            parts += [f"\n## {_named(routes)}\n{COLUMNS}", *own]
    return "\n".join(parts) + "\n"


def _named(routes: str) -> str:
    return ", ".join(f"`{route}`" for route in routes.split(", "))


def _rows(table: FieldTable, path: str, shared: Mapping[str, Rule]) -> Iterator[str]:
    """The rows of `table` that `shared` does not have; fields with one rule are in one row."""
    own = [(name, rule) for name, rule in table.rules.items() if shared.get(name) != rule]
    for (reason, is_refused, unset), group in groupby(
        own, lambda row: (row[1].reason, row[1].is_refused, row[1].unset)
    ):
        names = ", ".join(f"`{path}{name}`" for name, _ in group)
        values = ", ".join(f"`{json.dumps(value)}`" for value in (None, *unset))
        yield f"| {names} | {values} | {'400' if is_refused else 'no effect'} | {reason} |"
    for name, inner in table.nested.items():
        if inner.kinds:
            kinds = ", ".join(f"`{json.dumps(kind)}`" for kind in inner.kinds)
            yield f"| `{path}{name}.type` | {kinds} | no effect | an object of another type is left out |"
        yield from _rows(inner, f"{path}{name}.", shared)


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    (root / DOCS).write_text(page(), encoding="utf-8")
