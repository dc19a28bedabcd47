"""Writes docs/request_fields.md from the tables of request fields that have no action here.

    python tools/field_docs.py [ROOT]

A test holds the page to what this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_infer.server.field_tables import TABLES
from megatron_infer.server.request_fields import FieldTable

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
`python tools/field_docs.py` from `megatron_infer/server/field_tables.py`, and held to it by a test.
"""


def page() -> str:
    parts = [HEAD]
    for routes, table in TABLES.items():
        named = ", ".join(f"`{route}`" for route in routes.split(", "))
        parts.append(f"\n## {named}\n\n| field | taken and not named | else | |\n|---|---|---|---|")
        parts += _rows(table, "")
    return "\n".join(parts) + "\n"


def _rows(table: FieldTable, path: str) -> Iterator[str]:
    for name, rule in table.rules.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in (None, *rule.unset))
        what = "400" if rule.is_refused else "no effect"
        yield f"| `{path}{name}` | {values} | {what} | {rule.reason} |"
    for name, inner in table.nested.items():
        if inner.kinds:
            kinds = ", ".join(f"`{json.dumps(kind)}`" for kind in inner.kinds)
            yield f"| `{path}{name}.type` | {kinds} | no effect | an object of another type is left out |"
        yield from _rows(inner, f"{path}{name}.")


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    (root / DOCS).write_text(page(), encoding="utf-8")
