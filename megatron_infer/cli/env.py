"""`megatron-infer env`: versions, CPU features, compilers, and the chosen kernels with reasons. Never fails."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import Any

from megatron_infer.cli.collect_env import Fact, as_dict, as_text, collect


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "env",
        help="versions, CPU features, and the chosen kernels with reasons",
        description="Versions, CPU features, memory, compilers, GPUs, and the chosen kernels with reasons, for bug "
        "reports. A probe that fails is reported in its line; the command itself does not fail.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(as_dict(facts), indent=2))
    elif importlib.util.find_spec("rich") is None:
        print(as_text(facts))
    else:
        _print_tables(facts)
    return 0


def _print_tables(facts: list[Fact]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in dict.fromkeys(fact.section for fact in facts):
        rows = [fact for fact in facts if fact.section == section]
        table = Table(title=section, title_justify="left", show_header=False, box=box.SIMPLE)
        for fact in rows:
            table.add_row(Text(fact.name), Text(fact.value), Text(fact.note, style="dim"))
        console.print(table)
