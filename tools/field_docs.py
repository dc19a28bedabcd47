"""Writes the pages docs/request_fields*.md from the tables of request fields that have no action here.

    python tools/field_docs.py [ROOT]

A test holds the pages to what this writes.
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

PAGE, OPENAI, TRAINING = (f"docs/request_fields{end}.md" for end in ("", "_openai", "_training"))
HEAD = """# Request fields without an action

A field of a client does nothing, or is a 400? The reply's header `x-ignored-fields` or the error names the field.
Its reason is in a table: of the route, or of the shared fields below.

| routes | page |
|---|---|
| of OpenAI, Anthropic and Megatron clients | [request_fields_openai.md](request_fields_openai.md) |
| of training loops, with `--control` | [request_fields_training.md](request_fields_training.md) |

One policy holds on every route:

* A field at its default, and a null in any field, is taken.
* A field that changes nothing here is taken with any value and named in the reply's header `x-ignored-fields`;
  `--strict-fields` refuses it.
* A field that would change the answer and cannot act is a 400 that names it and says what to do.
* A field that is not known is a 400 with the nearest name.

`GET /openapi.json` has the fields that act, with their types. The others are in the tables: written by
`python tools/field_docs.py` from `megatron_infer/server/field_tables.py` and the tables of the routes, and held to it
by a test.

## Shared fields

These hold on {routes}, unless a field acts on the route or the table of the route has another row for the field.
"""
HEAD_OPENAI = """# Request fields of OpenAI, Anthropic and Megatron clients

Look up a field that a reply's header `x-ignored-fields` or an error names, in the table of the route. A field that is
not here is a [shared one](request_fields.md#shared-fields).
"""
HEAD_TRAINING = """# Request fields of training loops

Look up a field that a reply's header `x-ignored-fields` or an error of a route of `--control` names. A field that is
not here is a [shared one](request_fields.md#shared-fields). What the routes do: [control.md](control.md).
"""
COLUMNS = "\n| field | taken and not named | else | |\n|---|---|---|---|"


def operations(*, control: bool) -> dict[str, FieldTable]:
    """Routes with a table of fields, in the order of registration."""
    settings = ServerConfig(control=control)
    coordinator: Any = SimpleNamespace()
    routes = registered_routes(EngineClient(coordinator, None, settings, model="model"), settings)
    return {one.path: one.fields for one in routes.operations.values() if one.fields is not NO_FIELDS}


def tables() -> dict[str, FieldTable]:
    """Routes, with ", " between those of one table -> their table."""
    found: dict[int, tuple[FieldTable, list[str]]] = {}
    for path, table in operations(control=True).items():
        found.setdefault(id(table), (table, []))[1].append(path)
    return {", ".join(paths): table for table, paths in found.values()}


def pages() -> dict[str, str]:
    """Paths of the pages -> what is in them."""
    shown, always = tables(), operations(control=False)
    sharing = [_named(routes) for routes, table in shown.items() if SHARED.keys() <= table.rules.keys()]
    first = [HEAD.replace("{routes}", ", ".join(sharing)) + COLUMNS, *_rows(FieldTable(SHARED), "", {})]
    found = {PAGE: first, OPENAI: [HEAD_OPENAI.rstrip()], TRAINING: [HEAD_TRAINING.rstrip()]}
    for routes, table in shown.items():
        own = list(_rows(table, "", SHARED))
        page = found[OPENAI if routes.partition(", ")[0] in always else TRAINING]
        page += [f"\n## {_named(routes)}\n{COLUMNS}", *own] if own else []
    return {path: "\n".join(parts) + "\n" for path, parts in found.items()}


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
    for path, text in pages().items():
        (root / path).write_text(text, encoding="utf-8")
