"""Writes what follows from the declarations of options: docs/options.md and docs/pipeline_fields.md.

    python tools/option_docs.py [ROOT]

A test holds both pages to what this writes: they are the frozen list of options.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

from megatron_infer.cli.config_flags import flag_of
from megatron_infer.config.coordinator_options import CoordinatorOptions
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import Layout, RunOptions
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.options import Option, docs_of, options_of
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.config.structured_output import StructuredOutput
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
from megatron_infer.server.server_config import ServerConfig

OPTIONS = Path("docs/options.md")
FIELDS = Path("docs/pipeline_fields.md")
SEED_NAMES = Path("tests/contract/seed_names.txt")
NOT_BUILT = "not built: "
"""What a row's second column begins with where nothing is claimed."""


CLASSES: dict[type, str] = {
    InferenceConfig: "Of an engine: arguments of `InferenceConfig`, or keys of the mapping that "
    "`LLM(MODEL, config=...)` takes.",
    SpeculativeConfig: "`speculative` of `InferenceConfig`: see [speculative.md](speculative.md).",
    LoRAConfig: "`lora` of `InferenceConfig`: see [lora.md](lora.md).",
    RunOptions: "Of a model: arguments of `LLM`, and keys of the file of `serve --config`.",
    Layout: "Of a server: numbers of ranks, also keys of the file of `serve --config`.",
    SamplingParams: "Of a request: arguments of `SamplingParams`.",
    StructuredOutput: "`structured` of `SamplingParams`: see [structured_output.md](structured_output.md).",
    ServerConfig: "Of the HTTP server: keys of the file of `serve --config`, and `MEGATRON_INFER_NAME` in the "
    "environment.",
    CoordinatorOptions: "Of a coordinator: flags of `megatron-infer coordinator`, see [parallel.md](parallel.md).",
}
"""Class that declares options -> what they are of."""


def options_page() -> str:
    """docs/options.md."""
    lines = [
        "# Options",
        "",
        "Look an option up here by its name or its flag. `since`: the first megatron-core whose `InferenceConfig` has",
        "the option. `python tools/option_docs.py` writes this page from the declarations of the options.",
    ]
    for config, about in CLASSES.items():
        docs = docs_of(config)
        lines += ["", f"## {config.__name__}", "", about, ""]
        lines += ["| option | type | default | flag | since | |", "|---|---|---|---|---|---|"]
        for name, one in options_of(config).items():
            default = one.default.value if isinstance(one.default, Enum) else one.default
            flag = "" if one.flag is None else f"`{flag_of(one)}`"
            cells = (f"`{name}`", f"`{_type_of(one)}`", f"`{default!r}`", flag, one.since, docs[name])
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _type_of(one: Option) -> str:
    """The type of an option, or its values and the range of a number."""
    if one.words:
        return ", ".join(one.words)
    if one.kind not in ("int", "float", "int | float") or one.least is one.above is None:
        return one.type_text
    low = f"> {one.above}" if one.least is None else f">= {one.least}"
    high = f", < {one.below}" if one.below is not None else "" if one.most is None else f", <= {one.most}"
    return f"{one.type_text}, {low}{high}"


def fields_page(root: Path) -> str:
    """docs/pipeline_fields.md."""
    lines = [
        "# Fields and names of the pipelines",
        "",
        "Look a field of `PipelineConfig` up here, or a name of MAX's or Megatron's documentation.",
        "[pipelines.md](pipelines.md) says how the tree is used. `python tools/option_docs.py` writes this page.",
        "",
        "## Fields",
        "",
        "The rows are in the annotations of the fields (`pipelines/field_rows.py`). With",
        '`speculative_method="standalone"` `draft_model_path` acts: the draft model has the dtype, device and cache of',
        "the model. The other fields of the draft model (`draft_...`) are refused.",
        "",
        *field_table(),
        "",
        "## Names",
        "",
        "The names of MAX's pages of its pipeline configuration, its interfaces and its overlap pipeline, and those of",
        "Megatron's page of its inference configuration: where each lives here, and a test that shows it acting.",
        "",
        *name_table(root),
    ]
    return "\n".join(lines) + "\n"


def field_table() -> list[str]:
    """A row for each field of the tree: name, default, what it acts as, what it does."""
    lines = ["| field | default | acts as | |", "|---|---|---|---|"]
    for path, info, row in rows_of(PipelineConfig):
        default = info.get_default(call_default_factory=True)
        shown, dotted = getattr(default, "value", default), ".".join(path)
        refused = f" Other values are refused: {row.reason}." if isinstance(row, Refused) else ""
        lines.append(f"| `{dotted}` | `{shown!r}` | {_acts_as(row)} | {description_of(info)}{refused} |")
    return lines


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


def name_table(root: Path) -> list[str]:
    """A row for each name: where it lives here, and the test that shows it acting."""
    lines = ["| name | here | shown by |", "|---|---|---|"]
    for name, where, test in seed_names(root):
        here = where if where.startswith(NOT_BUILT) else f"`{where.replace(':', '.')}`"
        shown = f"`{name}`" if where.startswith("megatron_infer") else name
        lines.append(f"| {shown} | {here} | {test if test == '-' else f'`{test}`'} |")
    return lines


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    (root / OPTIONS).write_text(options_page(), encoding="utf-8")
    (root / FIELDS).write_text(fields_page(root), encoding="utf-8")
