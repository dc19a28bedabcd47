"""Writes the tables of docs/pipelines.md: the fields of the configuration tree, and the names of the pages it follows.

    python tools/pipeline_docs.py [ROOT]

A test holds the page to what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_infer.pipelines.config import PipelineConfig
from megatron_infer.pipelines.field_rows import (
    Engine,
    Model,
    RanksOf,
    Refused,
    Row,
    Rule,
    Server,
    description_of,
    rows_of,
)

DOCS = Path("docs/pipelines.md")
SEED_NAMES = Path("tests/contract/seed_names.txt")
NOT_BUILT = "not built: "
"""What a row's second column begins with where nothing is claimed."""


def with_tables(text: str, root: Path) -> str:
    """The page's text with what lies between its marks generated."""
    for name, generated in ("fields", field_table()), ("names", name_table(root)):
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        assert found and found_end, f"{DOCS} lacks its marks {begin.strip()} and {end}"
        text = f"{before}{begin}{generated}\n{end}{after}"
    return text


def field_table() -> str:
    """A row for each field of the tree: name, default, what it acts as, what it does."""
    lines = ["| field | default | acts as | |", "|---|---|---|---|"]
    for path, info, row in rows_of(PipelineConfig):
        default = info.get_default(call_default_factory=True)
        shown, dotted = getattr(default, "value", default), ".".join(path)
        refused = f" Other values are refused: {row.reason}." if isinstance(row, Refused) else ""
        lines.append(f"| `{dotted}` | `{shown!r}` | {_acts_as(row)} | {description_of(info)}{refused} |")
    return "\n".join(lines)


def _acts_as(row: Row) -> str:
    match row:
        case Engine(option):
            return f"`{option}` of InferenceConfig"
        case Server(option):
            return f"`{option}` of ServerConfig"
        case Model(argument):
            return f"`{argument}` of LLM"
        case RanksOf(axis):
            return f"`--{axis}`"
        case Rule():
            return "its own rule"
    return "default only"


def seed_names(root: Path) -> list[tuple[str, str, str]]:
    """(name on its page, module:name here or what is not built, test) of each row."""
    lines = (root / SEED_NAMES).read_text(encoding="utf-8").splitlines()
    rows = [tuple(part.strip() for part in line.split("|")) for line in lines if line and not line.startswith("#")]
    return [(row[0], row[1], row[2]) for row in rows]


def name_table(root: Path) -> str:
    """A row for each name: where it lives here, and the test that shows it acting."""
    lines = ["| name | here | shown by |", "|---|---|---|"]
    for name, where, test in seed_names(root):
        here = where if where.startswith(NOT_BUILT) else f"`{where.replace(':', '.')}`"
        shown = f"`{name}`" if where.startswith("megatron_infer") else name
        lines.append(f"| {shown} | {here} | {test if test == '-' else f'`{test}`'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    page = root / DOCS
    page.write_text(with_tables(page.read_text(encoding="utf-8"), root), encoding="utf-8")
