"""`megatron-infer serve MODEL`: OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import os
from enum import Enum
from typing import Any

from megatron_infer.cli.coordinator import add_key_option, key_from
from megatron_infer.cli.loading import add_run_options, note
from megatron_infer.cli.options import docs_of, given
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig, read_config_file, server_config_from
from megatron_infer.utils.stderr_log import log_to_stderr

NOT_TYPED = ("max_stop", "max_stop_chars", "max_schema_bytes", "max_schema_depth", "token_threads")
"""Options that only a configuration file and the environment say."""
LAYOUT = ("dp", "tp", "pp", "ep")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="OpenAI's API over HTTP",
        description="Serve a model over HTTP: /v1/completions, /v1/chat/completions and more (GET /openapi.json). "
        "SIGTERM or Ctrl-C lets running requests end; a second Ctrl-C ends at once. Engines of several processes: "
        "torchrun --nproc-per-node N -m megatron_infer serve MODEL --tp T --pp P --ep E --dp D.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for generate; may stand in --config instead")
    parser.add_argument("--config", metavar="FILE", help="YAML: options below by name, model, and engine: {...}")
    parser.add_argument(
        "--coordinator", metavar="ADDRESS", help="HTTP only: the engines are behind this coordinator (replica)"
    )
    add_key_option(parser)
    _add_server_options(parser)
    layout = parser.add_argument_group("layout", "how many processes; --tp, --pp and --ep need torchrun")
    words = {"dp": "engines side by side", "tp": "tensor-parallel ranks", "pp": "pipeline stages", "ep": "expert ranks"}
    for name in LAYOUT:
        layout.add_argument(f"--{name}", type=int, default=None, metavar="N", help=f"{words[name]} (default 1)")
    add_run_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "also as MEGATRON_INFER_NAME in the environment, and in --config")
    docs = docs_of(ServerConfig)
    kinds: dict[str, Any] = {"int": int, "float": float}
    for item in dataclasses.fields(ServerConfig):
        if item.name in NOT_TYPED:
            continue
        flag, kind = "--" + item.name.replace("_", "-"), str(item.type)
        how: dict[str, Any] = {"type": kinds.get(kind, str), "metavar": item.name.split("_")[-1].upper()}
        if kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        elif kind.startswith("tuple"):
            how["nargs"] = "+"
        shown = "" if item.default is None or item.default == () else f" (default {item.default})"
        text = (docs[item.name] + shown).replace("%", "%%")
        group.add_argument(flag, dest=f"server_{item.name}", default=argparse.SUPPRESS, help=text, **how)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 0. Raises InferenceError when it cannot."""

    typed = {
        item.name: getattr(args, f"server_{item.name}")
        for item in dataclasses.fields(ServerConfig)
        if hasattr(args, f"server_{item.name}")
    }
    in_file, beside = read_config_file(args.config)
    settings = server_config_from(typed, os.environ, in_file)
    log_to_stderr("megatron_infer.server", times=True)
    _warn(settings)
    options = _engine_options(args, beside)
    layout = {name: _layout_of(name, args, beside) for name in LAYOUT}
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from megatron_infer.server.torchrun import serve_rank

        if args.coordinator is not None:
            raise ConfigError("--coordinator under torchrun: the first rank starts one; leave it out")
        serve_rank(options, settings, **layout)
        return 0
    wide = [name for name in ("tp", "pp", "ep") if layout[name] > 1]
    if wide:
        ranks = layout["tp"] * layout["pp"] * layout["ep"] * layout["dp"]
        raise ConfigError(
            f"--{wide[0]} {layout[wide[0]]} needs {ranks} processes: "
            f"torchrun --nproc-per-node {ranks} -m megatron_infer serve {options.model} ..."
        )
    from megatron_infer.server.launch import attach, serve

    options = dataclasses.replace(options, dp=layout["dp"])
    if args.coordinator is not None:
        attach(options, settings, args.coordinator, key_from(args), note)
    else:
        serve(options, settings, note=note)
    return 0


def _engine_options(args: argparse.Namespace, beside: dict[str, Any]) -> Any:
    """Command line over the file."""
    from megatron_infer.server.launch import EngineOptions

    model = args.model or beside.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("no model: give MODEL, or model: in --config")
    config = InferenceConfig.from_dict(beside.get("engine", {})).to_dict() if "engine" in beside else {}
    config = {name: config[name] for name in beside.get("engine", {})}
    config |= given(args)
    return EngineOptions(
        model=model,
        config={name: value.value if isinstance(value, Enum) else value for name, value in config.items()},
        dtype=args.dtype if args.dtype != "auto" else str(beside.get("dtype", "auto")),
        device=args.device if args.device != "auto" else str(beside.get("device", "auto")),
        threads=args.threads if args.threads is not None else beside.get("threads"),
    )


def _layout_of(name: str, args: argparse.Namespace, beside: dict[str, Any]) -> int:
    value = getattr(args, name)
    value = beside.get(name, 1) if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be an integer of at least 1")
    return value


def _warn(settings: ServerConfig) -> None:
    if settings.api_key is None and not settings.is_local:
        note(f"warning: whoever reaches {settings.host} is served; give --api-key")
