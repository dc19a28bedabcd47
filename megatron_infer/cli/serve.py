"""`megatron-infer serve MODEL`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron_infer.cli.config_flags import SERVER_PREFIX, add_flags, flag_of, given, given_flags
from megatron_infer.cli.coordinator import add_key_option, key_from
from megatron_infer.cli.loading import add_run_options, note, run_options
from megatron_infer.cli.pipeline_flags import add_pipeline_options, pipeline_from
from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import EngineRoles, Layout, RunOptions
from megatron_infer.config.options import options_of
from megatron_infer.config.request_metadata import FILLED
from megatron_infer.config.speculative import refuse_synthetic
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig, read_config_file, server_config_from
from megatron_infer.utils.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.server.process_options import EngineOptions

    Served: TypeAlias = tuple[EngineOptions, ServerConfig, Layout]

LOADER = "megatron_infer.pipelines.foreign_runner:load_engine"


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
    group = parser.add_argument_group("server", "also as MEGATRON_INFER_NAME in the environment, and in --config")
    add_flags(parser, group, ServerConfig, SERVER_PREFIX)
    layout = parser.add_argument_group("layout", "number of processes; --tp, --pp and --ep need torchrun")
    add_flags(parser, layout, Layout, "")
    add_flags(parser, layout, EngineRoles, "")
    add_run_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C -> 0. Raises InferenceError when it cannot serve."""
    options, settings, layout = _from_pipeline(args) or _from_options(args)
    log_to_stderr("megatron_infer.server", times=True)
    _warn(options, settings)
    roles = tuple(role.value for role in _roles(args).of_engines(layout))
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from megatron_infer.server.torchrun import serve_rank

        if args.coordinator is not None:
            raise ConfigError("--coordinator under torchrun: the first rank starts one; leave it out")
        if options.roles != (ReplicaRole.BOTH.value,):
            raise ConfigError("pipeline_role under torchrun: give --prefill and --decode in its place")
        serve_rank(replace(options, roles=roles), settings, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        return 0
    parallel = [name for name in ("tp", "pp", "ep") if getattr(layout, name) > 1]
    if parallel:
        ranks = len(roles) * layout.world_size // layout.dp
        raise ConfigError(
            f"--{parallel[0]} {getattr(layout, parallel[0])} needs {ranks} processes: "
            f"torchrun --nproc-per-node {ranks} -m megatron_infer serve {options.model} ..."
        )
    from megatron_infer.server.launch import attach, join, serve

    if options.roles != (ReplicaRole.BOTH.value,):
        _check_one_engine(args, layout)
        join(options, settings, key_from(args), note)
        return 0
    options = replace(options, roles=roles)
    if args.coordinator is not None:
        _check_starts_no_engine(args, options)
        attach(options, settings, args.coordinator, key_from(args), note)
    else:
        serve(options, settings, note=note)
    return 0


def _roles(args: argparse.Namespace) -> EngineRoles:
    """Those of the command line, else of the file."""
    _, file = read_config_file(args.config)
    in_file = {name: file[name] for name in options_of(EngineRoles) if name in file}
    return EngineRoles(**in_file | given_flags(args, EngineRoles, ""))


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
        roles=(resolved.role,),
        loader=loader,
        loader_options=loader_options,
    )
    return options, resolved.server, resolved.layout


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
    file_options, engine_options = read_config_file(args.config)
    settings = server_config_from(given_flags(args, ServerConfig, SERVER_PREFIX), os.environ, file_options)
    in_file = {name: engine_options[name] for name in options_of(Layout) if name in engine_options}
    layout = Layout(**in_file | given_flags(args, Layout, ""))
    layout.check()
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
    run = RunOptions(**{name: file[name] for name in options_of(RunOptions) if name in file} | run_options(args))
    return EngineOptions(
        model=model,
        config={name: value.value if isinstance(value, Enum) else value for name, value in config.items()},
        **asdict(run),
    )


def _check_one_engine(args: argparse.Namespace, layout: Layout) -> None:
    """Raises ConfigError for what a replica with a pipeline_role cannot have next to it."""
    if args.coordinator is not None or layout.dp > 1 or _roles(args).prefill:
        raise ConfigError("pipeline_role is of one engine: leave --coordinator, --dp, --prefill and --decode out")


def _check_starts_no_engine(args: argparse.Namespace, options: EngineOptions) -> None:
    """Raises ConfigError for flags that would have no effect beside --coordinator."""
    layout = {**given_flags(args, Layout, ""), **given_flags(args, EngineRoles, "")}
    typed = [*given(args), *layout, *run_options(args)]
    if options.endpoint_base is not None:
        typed.append("zmq_endpoint_base")
    if typed:
        flags = ", ".join(map(flag_of, typed))
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
