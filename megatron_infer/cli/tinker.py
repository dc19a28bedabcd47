"""`megatron-infer tinker MODEL`: clients of the Tinker API train adapters of one live model and sample from them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_infer.cli.config_flags import SERVER_PREFIX, add_flags, given, given_flags
from megatron_infer.cli.loading import add_model_options, note, positive_int, run_options
from megatron_infer.config.layout import Layout
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig, server_config_from
from megatron_infer.server.tinker.tenants import read_keys
from megatron_infer.utils.stderr_log import log_to_stderr

LORA_RANK = 32
DIVIDED = ("multi_latent_attention", "num_moe_experts")
"""Fields of TransformerConfig: over --tp megatron-core trains such a model with sequence parallelism only."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tinker",
        help="train and sample adapters of one live model by the Tinker API",
        description="Serve the Tinker API to the official SDK and cookbook: TINKER_BASE_URL=http://127.0.0.1:8000 "
        "TINKER_API_KEY=tml-... Base weights are there once; each training client is a LoRA adapter. For several "
        "processes: torchrun --nproc-per-node N -m megatron_infer tinker MODEL --tp T --pp P --ep E --dp D.",
    )
    add_model_options(parser)
    parser.add_argument("--lora-rank", type=positive_int, help="largest rank of a client's adapter (default 32)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="one client trains all weights, whatever rank it asks for, in place of adapters",
    )
    parser.add_argument("--state-dir", default="tinker-state", metavar="DIR", help="checkpoints (default tinker-state)")
    parser.add_argument(
        "--durable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="each optim_step is in --state-dir when its call ends, 12 bytes a parameter, and a server that is started "
        "again has the clients (default: on)",
    )
    parser.add_argument(
        "--tenants",
        metavar="FILE",
        help="a line NAME KEY for each tenant, whose clients, paths and samples no other key sees; needs --api-key too",
    )
    parser.add_argument(
        "--training-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the time, for training while samples are drawn too; above 0 and below 1 (default 0.5)",
    )
    layout = parser.add_argument_group("layout", "number of processes, which torchrun starts")
    add_flags(parser, layout, Layout, "")
    group = parser.add_argument_group("server", "also as MEGATRON_INFER_NAME in the environment")
    add_flags(parser, group, ServerConfig, SERVER_PREFIX)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C -> 0. Raises InferenceError when it cannot serve."""
    defaults = {"isolate_prefix_cache": bool(args.tenants)}
    settings = server_config_from(given_flags(args, ServerConfig, SERVER_PREFIX), os.environ, defaults)
    if settings.api_key is not None and not settings.api_key.startswith("tml-"):
        raise ConfigError("api_key: the Tinker SDK sends keys that begin with tml-; choose such a one")
    if settings.api_key is None and not settings.is_local:
        raise ConfigError(
            f"tinker at {settings.host} needs an API key: others could train and fill --state-dir; set api_key"
        )
    layout, is_job = Layout(**given_flags(args, Layout, "")), int(os.environ.get("WORLD_SIZE", "1")) > 1
    layout.check()
    if layout.world_size > 1 and not is_job:
        ranks = layout.world_size
        raise ConfigError(
            f"dp x tp x pp x ep = {ranks} needs as many processes: torchrun --nproc-per-node {ranks} -m megatron_infer "
            "tinker ..."
        )
    if args.full and args.lora_rank:
        raise ConfigError("--full with --lora-rank: there are no adapters; leave one of them out")
    keys = dict[str, str]()
    if args.tenants:
        if args.full:
            raise ConfigError("--full with --tenants: one client trains all weights; leave one of them out")
        if settings.api_key is None:
            raise ConfigError(
                "--tenants without api_key: /metrics and all routes but the Tinker API need it; set api_key"
            )
        keys = read_keys(Path(args.tenants), server_key=settings.api_key)
        if not settings.isolate_prefix_cache:
            raise ConfigError(
                "--tenants with isolate_prefix_cache off: samples say how much of a prompt was cached, which tells a "
                "tenant what others have sent; leave one of them out"
            )
    if not 0 < args.training_share < 1:
        raise ConfigError(
            f"training_share is {args.training_share}, it must be above 0 and below 1: samples need steps"
        )
    if settings.http_workers > 1:
        raise ConfigError("http_workers: one process serves the Tinker API; leave it out")
    log_to_stderr("megatron_infer.server", times=True)
    options, config = run_options(args), given(args)
    note(f"loading {args.model} ...")
    from megatron_infer.kernels.threads import apply_cpu_settings
    from megatron_infer.memory.device import Device, choose_dtype
    from megatron_infer.models.loading.sources import open_source
    from megatron_infer.server.tinker.serve import live_model, serve
    from megatron_infer.server.tinker.training import LiveTrainer

    device, groups = options.get("device", "auto"), None
    source = open_source(args.model)
    is_divided = layout.tp > 1 and any(source.config().transformer.get(name) for name in DIVIDED)
    _check_layout(layout, config, is_divided=is_divided, is_cuda=Device(device).is_cuda)
    if is_job:
        from megatron_infer.server.tinker.ranks import build_job, serve_ranks
        from megatron_infer.server.torchrun import device_of_rank

        groups, device = build_job(layout), device_of_rank(device)
    where = Device(device)
    if not where.is_cuda:
        apply_cpu_settings(options.get("threads"))
    tokenizer = source.tokenizer()
    model = live_model(
        source,
        tokenizer,
        lora_rank=None if args.full else args.lora_rank or LORA_RANK,
        dtype=choose_dtype(options.get("dtype", "auto"), where, linear_backend=config.get("linear_backend", "auto")),
        device=str(where.torch),
        config=config,
        groups=groups,
        expert_parallel=layout.ep,
        **({"sequence_parallel": True} if is_divided else {}),
    )
    name = (settings.served_model_name or (source.name,))[0]
    run_server = partial(
        serve,
        tokenizer=tokenizer,
        settings=settings,
        model_name=name,
        state_dir=Path(args.state_dir),
        keys=keys,
        durable=args.durable,
        note=note,
    )
    if is_job:
        serve_ranks(model, training_share=args.training_share, serve=run_server)
    else:
        run_server(LiveTrainer(model, training_share=args.training_share))
    return 0


def _check_layout(layout: Layout, config: Mapping[str, Any], *, is_divided: bool, is_cuda: bool) -> None:
    """Raises ConfigError for what does not train over these ranks. is_divided: with sequence parallelism."""
    of_experts = "--tp with experts or multi-latent attention"
    needs_cuda = {"--pp": layout.pp > 1, "--ep": layout.ep > 1, of_experts: is_divided}
    if (name := next((name for name, is_asked in needs_cuda.items() if is_asked), None)) and not is_cuda:
        raise ConfigError(f"{name} on a CPU: megatron-core trains so on CUDA devices only; leave it out, or give --dp")
    if is_divided and config.get("batch_invariant"):
        raise ConfigError(
            f"--batch-invariant and {of_experts}: megatron-core trains them with sequence parallelism, which exact "
            "mode does not have; leave one of them out"
        )
    if config.get("dp_attention", False) is not False:
        raise ConfigError("--dp-attention: one rank of an engine has all requests of the Tinker API; leave it out")
