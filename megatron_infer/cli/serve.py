"""`megatron-infer serve MODEL`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import os
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_infer.cli.config_flags import docs_of, given
from megatron_infer.cli.coordinator import add_key_option, key_from
from megatron_infer.cli.loading import add_run_options, note
from megatron_infer.cli.parser import Parser
from megatron_infer.cli.pipeline_flags import LAYOUT, add_pipeline_options, pipeline_from
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.request_metadata import FILLED
from megatron_infer.config.speculative import refuse_synthetic
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig, read_config_file, server_config_from
from megatron_infer.utils.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.server.process_options import EngineOptions

    Served: TypeAlias = tuple[EngineOptions, ServerConfig, dict[str, int]]

LOADER = "megatron_infer.pipelines.foreign_runner:load_engine"
NOT_FLAGS = ("max_stop", "max_stop_chars", "max_schema_bytes", "max_schema_depth", "token_threads")
"""Options for the configuration file and the environment only."""
COMMON = frozenset(
    (
        "--host",
        "--port",
        "--http-workers",
        "--api-key",
        "--allowed-host",
        "--allow-origin",
        "--served-model-name",
        "--tool-call-parser",
        "--reasoning-parser",
        "--control",
        "--weights-root",
        "--lora-root",
        "--max-queue",
        "--request-timeout-s",
        "--record",
        "--log-requests",
    )
)
"""The flags that --help shows; --help-all shows all."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="OpenAI-compatible HTTP server",
        description="Serve a model over HTTP: /v1/completions, /v1/chat/completions and more (GET /openapi.json). "
        "SIGTERM or Ctrl-C lets running requests finish; a second one ends at once. For engines of several processes: "
        "torchrun --nproc-per-node N -m megatron_infer serve MODEL --tp T --pp P --ep E --dp D.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for generate; or in --config")
    parser.add_argument("--config", metavar="FILE", help="YAML: server options by name, model, and engine: {...}")
    parser.add_argument(
        "--coordinator", metavar="ADDRESS", help="serve HTTP only, for the replicas of this coordinator"
    )
    add_key_option(parser)
    _add_server_options(parser)
    layout = parser.add_argument_group("layout", "number of processes; --tp, --pp and --ep need torchrun")
    docs = {"dp": "engines", "tp": "tensor-parallel ranks", "pp": "pipeline stages", "ep": "expert-parallel ranks"}
    for name in LAYOUT:
        layout.add_argument(f"--{name}", type=int, default=None, metavar="N", help=f"{docs[name]} (default 1)")
    add_run_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "also as MEGATRON_INFER_NAME in the environment, and in --config")
    docs = docs_of(ServerConfig)
    kinds: dict[str, Any] = {"int": int, "float": float}
    for item in dataclasses.fields(ServerConfig):
        if item.name in NOT_FLAGS:
            continue
        flag, kind = "--" + item.name.replace("_", "-"), str(item.type)
        parsing: dict[str, Any] = {"type": kinds.get(kind, str), "metavar": item.name.split("_")[-1].upper()}
        if kind == "bool":
            parsing = {"action": argparse.BooleanOptionalAction}
        elif kind.startswith("tuple"):
            parsing |= {"nargs": "+", "action": "extend"}
        shown = "" if item.default is None or item.default == () else f" (default {item.default})"
        text = (docs[item.name] + shown).replace("%", "%%")
        group.add_argument(flag, dest=f"server_{item.name}", default=argparse.SUPPRESS, help=text, **parsing)
    if isinstance(parser, Parser):
        parser.show_first("server", COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C -> 0. Raises InferenceError when it cannot serve."""
    options, settings, layout = _from_pipeline(args) or _from_options(args)
    log_to_stderr("megatron_infer.server", times=True)
    _warn(options, settings)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from megatron_infer.server.torchrun import serve_rank

        if args.coordinator is not None:
            raise ConfigError("--coordinator under torchrun: the first rank starts one; leave it out")
        serve_rank(options, settings, **layout)
        return 0
    parallel = [name for name in ("tp", "pp", "ep") if layout[name] > 1]
    if parallel:
        ranks = layout["tp"] * layout["pp"] * layout["ep"] * layout["dp"]
        raise ConfigError(
            f"--{parallel[0]} {layout[parallel[0]]} needs {ranks} processes: "
            f"torchrun --nproc-per-node {ranks} -m megatron_infer serve {options.model} ..."
        )
    from megatron_infer.server.launch import attach, serve

    options = dataclasses.replace(options, dp=layout["dp"])
    if args.coordinator is not None:
        _check_starts_no_engine(args, options)
        attach(options, settings, args.coordinator, key_from(args), note)
    else:
        serve(options, settings, note=note)
    return 0


def _from_pipeline(args: argparse.Namespace) -> Served | None:
    """What a PipelineConfig serves; None if the command line has no field of one."""
    from megatron_infer.server.process_options import EngineOptions

    config = pipeline_from(args)
    if config is None:
        return None
    resolved = config.resolved
    loader, loader_options = _loader_of(config)
    options = EngineOptions(
        **resolved.llm,
        config=resolved.engine.to_dict(),
        chat_template=resolved.chat_template,
        endpoint_base=resolved.endpoint_base or None,
        loader=loader,
        loader_options=loader_options,
    )
    return options, resolved.server, dataclasses.asdict(resolved.layout)


def _loader_of(config: PipelineConfig) -> tuple[str | None, dict[str, Any]]:
    """What makes the engine of a model of one's own, and its arguments; (None, {}) for other models."""
    architecture = config.resolved.architecture
    if architecture.pipeline_model is None:
        return None, {}
    if "RANK" in os.environ:
        raise NotImplementedError(
            f"{architecture.name} is an architecture of one's own, which has no ranks: serve it without torchrun"
        )
    given = {name: str(value) if isinstance(value, os.PathLike) else value for name, value in config.requested.items()}
    return LOADER, {name: value for name, value in given.items() if name not in ("config_file", "section_name")}


def _from_options(args: argparse.Namespace) -> Served:
    given_options = {
        item.name: getattr(args, f"server_{item.name}")
        for item in dataclasses.fields(ServerConfig)
        if hasattr(args, f"server_{item.name}")
    }
    file_options, engine_options = read_config_file(args.config)
    settings = server_config_from(given_options, os.environ, file_options)
    layout = {name: _layout_size(name, args, engine_options) for name in LAYOUT}
    options = _engine_options(args, engine_options)
    if settings.lora_root is not None:
        options.config.setdefault("lora", {})
    return options, settings, layout


def _engine_options(args: argparse.Namespace, file: dict[str, Any]) -> EngineOptions:
    """Those of the command line, else of the file."""
    from megatron_infer.server.process_options import EngineOptions

    model = args.model or file.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("no model: give MODEL, or model: in --config")
    config = InferenceConfig.from_dict(file.get("engine", {})).to_dict() if "engine" in file else {}
    config = {name: config[name] for name in file.get("engine", {})}
    config |= given(args)
    refuse_synthetic(config.get("speculative"), "a server")
    return EngineOptions(
        model=model,
        config={name: value.value if isinstance(value, Enum) else value for name, value in config.items()},
        dtype=args.dtype if args.dtype != "auto" else str(file.get("dtype", "auto")),
        device=args.device if args.device != "auto" else str(file.get("device", "auto")),
        threads=args.threads if args.threads is not None else file.get("threads"),
    )


def _layout_size(name: str, args: argparse.Namespace, file: dict[str, Any]) -> int:
    value = getattr(args, name)
    value = file.get(name, 1) if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be an integer of at least 1")
    return value


def _check_starts_no_engine(args: argparse.Namespace, options: EngineOptions) -> None:
    """Raises ConfigError for flags that would have no effect beside --coordinator."""
    typed = [*given(args), *(name for name in LAYOUT if getattr(args, name) is not None)]
    defaults = {"dtype": "auto", "device": "auto", "threads": None}
    typed += [name for name, unset in defaults.items() if getattr(args, name) != unset]
    if options.endpoint_base is not None:
        typed.append("zmq_endpoint_base")
    if typed:
        flags = ", ".join("--" + name.replace("_", "-") for name in typed)
        raise ConfigError(
            f"{flags} with --coordinator, which starts neither engines nor a coordinator; leave it out, and give "
            "options of engines to megatron-infer replica"
        )


def _warn(options: EngineOptions, settings: ServerConfig) -> None:
    types = options.config.get("request_metadata_types") or ()
    if any(label not in FILLED for label, *_ in types):
        note("warning: request_metadata_types: calls over HTTP cannot give values and are refused; Python clients can")
    if settings.api_key is None and not settings.is_local:
        note(f"warning: every client that reaches {settings.host} is served; give --api-key")
