"""Command lines of pages, held against what would parse them: flags, paths, targets and extras that are there."""

from __future__ import annotations

import re
import shlex
import tomllib

from pages import ROOT
from torch.distributed.run import get_args_parser

from megatron_infer.cli.config_flags import add_config_options
from megatron_infer.cli.main import Parser, build_parser

SCRIPTS_OF_OTHERS = ("megatron_infer.mcore", "verl.trainer.main_ppo")
"""Modules that take the arguments of another project."""


def wrong(command: str) -> str | None:
    """What would refuse the line before it does anything; None: nothing."""
    words = shlex.split(command)
    check = {"megatron-infer": _package, "torchrun": _torchrun, "python": _script, "make": _make, "pip": _pip}
    if words[:3] == ["python3.11", "-m", "venv"]:
        return None if len(words) > 3 else "no directory"
    if words[0] == "curl":
        return None if any("/" in word for word in words[1:]) else "no URL"
    return check[words[0]](words[1:]) if words[0] in check else f"{words[0]}: not a command that is known here"


def _package(words: list[str]) -> str | None:
    parser, parsers = build_parser(words[0])
    if words[0] not in parsers:
        return f"no command {words[0]}"
    try:
        _, unknown = parser.parse_known_args(words)
    except SystemExit:
        return "refused"
    return f"unknown: {' '.join(unknown)}" if unknown else None


def _torchrun(words: list[str]) -> str | None:
    try:
        args = get_args_parser().parse_args(words)
    except SystemExit:
        return "refused by torchrun"
    if args.module and args.training_script in SCRIPTS_OF_OTHERS:
        return None
    if args.module:
        return _package(args.training_script_args) if args.training_script == "megatron_infer" else "unknown module"
    return _script([args.training_script, *args.training_script_args])


def _script(words: list[str]) -> str | None:
    if words[0] == "-m" and words[1] in SCRIPTS_OF_OTHERS:
        return None
    if "on_cpu.py" in words[0] and "-m" in words:
        return None if words[words.index("-m") + 1] in SCRIPTS_OF_OTHERS else "unknown module"
    path = ROOT / words[0]
    if not path.is_file():
        return f"no file {words[0]}"
    text = "".join(one.read_text(encoding="utf-8") for one in path.parent.rglob("*.py"))
    engine = Parser(add_help=False)
    add_config_options(engine)
    known = set(engine._option_string_actions)
    if path.name == "peers.py":
        known |= set(build_parser("bench")[1]["bench"]._option_string_actions)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    shown = [{f'"{flag}"', f'"{flag[2:].replace("-", "_")}":'} for flag in flags]  # a case of variants.py has a table
    missing = [
        flag for flag, ways in zip(flags, shown, strict=True) if not (flag in known or any(w in text for w in ways))
    ]
    return f"unknown: {' '.join(missing)}" if missing else None


def _make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    missing = [target for target in targets if not re.search(rf"^{target}:", text, re.MULTILINE)]
    return f"no target {' '.join(missing)}" if missing else None


def _pip(words: list[str]) -> str | None:
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["dynamic"]
    missing = set(re.findall(r"\[(\w+)\]", " ".join(words))) - set(dynamic["optional-dependencies"])
    return f"no extra {' '.join(missing)}" if missing else None
