"""`megatron-infer plan`: the sizes of an engine, from the model's description, the options and the memory."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.config_flags import given
from megatron_infer.cli.loading import add_run_options, run_options
from megatron_infer.cli.pipeline_flags import add_pipeline_options, pipeline_from
from megatron_infer.cli.plan_roofline import add_roofline_options, show_roofline, wants_roofline
from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.capacity import GIB
from megatron_infer.config.checks import check_draft_weights
from megatron_infer.config.graph_memory import GraphMemory, ShapeBytes
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import RunOptions, describe_dp_attention
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sizing import STATE_SIZES
from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig

SHOWN_SHAPES = 8
"""Most rows of the table of graphs; JSON has all."""
MIB = 1 << 20
PIPED_COLUMNS = 140
"""Width of the table if the output is no terminal."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="sizes of an engine, from the model, the options and the memory",
        description="Resolve every size of an engine from the model's description: bytes per block, blocks, requests, "
        "tokens. No weights are loaded. generate and chat with the same options have the same sizes.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="alias (smollm2), directory, hub id, .gguf file or checkpoint"
    )
    parser.add_argument(
        "--tensor-parallel-size", "--tp", type=int, default=1, metavar="N", help="ranks that share a model (1)"
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=None,
        metavar="GIB",
        help="free memory to plan for, instead of this machine's",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_roofline_options(parser)
    add_run_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_infer.memory.device import Device, choose_dtype
    from megatron_infer.models.loading.description_shape import shape_of
    from megatron_infer.models.loading.sources import open_source

    if wants_roofline(args):
        show_roofline(args)
        return 0
    if args.memory_gb is not None and not args.memory_gb > 0:
        raise ConfigError(f"--memory-gb is {args.memory_gb}, it must be above 0")
    if args.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size is {args.tensor_parallel_size}, it must be at least 1")
    free_bytes = None if args.memory_gb is None else int(args.memory_gb * GIB)
    pipeline = pipeline_from(args, free_bytes=free_bytes)
    if pipeline is not None:
        _show_pipeline(args, pipeline)
        return 0
    if args.model is None:
        raise ConfigError("no model: give MODEL, or model_path in --config-file")
    options = run_options(args)
    on = RunOptions(**options)
    if "threads" in options:
        raise ConfigError("--threads has no use in a plan without options of a pipeline; leave it out")
    device = Device(on.device)
    asked, plan = given(args), open_source(args.model).config()
    linear = asked.get("linear_backend", "auto")
    dtype = str(choose_dtype(on.dtype, device, linear_backend=linear)).removeprefix("torch.")
    shape = shape_of(plan, dtype=dtype, tensor_parallel_size=args.tensor_parallel_size)
    available = device.available_bytes() if free_bytes is None else free_bytes
    size = args.tensor_parallel_size
    config = machine_config(asked, shape, is_cuda=device.is_cuda, available_bytes=available, tensor_parallel_size=size)
    if device.is_cuda:
        config = config.on_device(is_cuda=True)
    draft = None
    if config.speculative is not None and (drafting := config.speculative.draft_model) is not None:
        draft = shape_of(open_source(drafting).config(), dtype=dtype, tensor_parallel_size=size)
        check_draft_weights(drafting, draft, available)
    sizes = config.resolve(shape, tensor_parallel_size=size, available_bytes=available, draft=draft)
    if args.json:
        print(json.dumps(as_dict(config, shape, sizes, size), indent=2))
    else:
        _print_table(args.model, config, shape, sizes)
        if draft is not None:
            print(f"draft model {drafting}: {_size(draft)}")
        if sizes.graph_shapes:
            _print_graphs(shape, sizes, size)
    return 0


def _show_pipeline(args: argparse.Namespace, pipeline: PipelineConfig) -> None:
    """Every field: asked, in effect, from where, why; then the sizes."""
    resolved = pipeline.resolved
    config, shape, sizes, size = resolved.engine, resolved.shape, resolved.sizes, resolved.layout.tp
    rows = {name: asdict(one) for name, one in pipeline.effective.items()}
    if args.json:
        rest = {} if shape is None or sizes is None else as_dict(config, shape, sizes, size)
        print(json.dumps({"fields": rows, **rest}, indent=2, default=str))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="fields of PipelineConfig", title_justify="left", box=box.SIMPLE)
    for column in ("field", "asked", "in effect", "from", "why"):
        table.add_column(column, no_wrap=column == "field")
    for name, one in rows.items():
        asked, effect = (str(getattr(one[key], "value", one[key])) for key in ("requested", "value"))
        table.add_row(name, Text(asked), Text(effect), one["source"], Text(one["note"], style="dim"))
    _console().print(table)
    if shape is not None and sizes is not None:
        _print_table(resolved.llm["model"], config, shape, sizes)


def as_dict(
    config: InferenceConfig, shape: ModelShape, sizes: ResolvedSizes, tensor_parallel_size: int = 1
) -> dict[str, Any]:
    memory = GraphMemory.sized(sizes, shape, tensor_parallel_size=tensor_parallel_size)
    return {
        "config": config.to_dict(),
        "model": asdict(shape),
        "sizes": {row.name: row._asdict() for row in sizes.table()},
        "batching": asdict(BatchingLimits.of(config, sizes)),
        "dp_attention": None
        if shape.experts is None
        else describe_dp_attention(config.dp_attention, sizes.max_requests),
        "graphs": {
            "pool_bytes": memory.pool_bytes(sizes.graph_shapes),
            "output_bytes": memory.output_bytes(sizes.graph_shapes),
            "shapes": [_graph(memory.of(one)) for one in sizes.graph_shapes],
        },
    }


def _graph(memory: ShapeBytes) -> dict[str, int]:
    """The estimate for one shape, in bytes."""
    names = ("activations", "scratch", "draw", "live")
    parts = {name: getattr(memory, name) for name in names}
    return asdict(memory.shape) | {f"{name}_bytes": count for name, count in parts.items()}


def _print_table(name: str, config: InferenceConfig, shape: ModelShape, sizes: ResolvedSizes) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{name}: {_size(shape)}", title_justify="left", box=box.SIMPLE)
    table.add_column("size", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("how it was derived")
    for row in sizes.table():
        if row.name in STATE_SIZES and shape.state is None:  # JSON has them always
            continue
        value, unit = _readable(row.value, row.unit)
        table.add_row(row.name, value, unit, Text(row.how, style="dim"))
    console = _console()
    console.print(table)
    changed = {key: value for key, value in config.to_dict().items() if value != InferenceConfig().to_dict()[key]}
    console.print(Text("options that differ from their defaults: " + ", ".join(f"{k}={v}" for k, v in changed.items())))
    limits = {key: value for key, value in asdict(BatchingLimits.of(config, sizes)).items() if value is not None}
    if shape.experts is not None:
        console.print(Text(describe_dp_attention(config.dp_attention, sizes.max_requests)))
    console.print(Text(f"batching {config.batching.value}" + "".join(f", {k} {v:,}" for k, v in limits.items())))


def _size(shape: ModelShape) -> str:
    parameters, weights = shape.num_parameters / 1e6, shape.weight_bytes / GIB
    return f"{parameters:,.1f} M parameters, {shape.dtype}, {weights:.2f} GiB of weights"


def _print_graphs(model: ModelShape, sizes: ResolvedSizes, tensor_parallel_size: int) -> None:
    """A table of the memory of each shape, smallest first; of many shapes some, always with the largest."""
    from rich import box
    from rich.table import Table

    memory = GraphMemory.sized(sizes, model, tensor_parallel_size=tensor_parallel_size)
    of_all = sorted((memory.of(shape) for shape in sizes.graph_shapes), key=lambda one: (one.live, one.shape))
    most = of_all[-1]
    last = len(of_all) - 1
    steps = min(SHOWN_SHAPES, len(of_all)) - 1
    shown = of_all if not steps else [of_all[round(place * last / steps)] for place in range(steps + 1)]
    table = Table(title="CUDA graphs, by estimate (MiB)", title_justify="left", box=box.SIMPLE)
    columns = ("tokens", "prefill rows", "decode rows", "activations", "layer scratch", "logits, draw", "needs alive")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for one in shown:
        sized = (one.activations, one.scratch, one.draw, one.live)
        table.add_row(*(f"{count:,}" for count in one.shape.as_tuple()), *(f"{count / MIB:,.1f}" for count in sized))
    console = _console()
    console.print(table)
    hidden = len(of_all) - len(shown)
    others = f" {hidden} more shapes lie between these (--json has all)." if hidden else ""
    outputs = memory.output_bytes(sizes.graph_shapes)
    console.print(f"Needs alive: activations and the larger of the two columns behind them.{others}", highlight=False)
    console.print(
        f"All graphs share one pool: {most.live / MIB:,.1f} MiB, the largest of these needs.", highlight=False
    )
    console.print(
        f"Outputs beside it: {outputs / MIB:,.1f} MiB. The log has the size of each after its capture.",
        highlight=False,
    )


def _console() -> Any:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_COLUMNS
    return console


def _readable(value: int | str, unit: str) -> tuple[str, str]:
    if isinstance(value, str):
        return value, unit
    if unit == "bytes" and value >= 1 << 20:
        return f"{value:,}", f"bytes ({value / (1 << 20):,.1f} MiB)"
    return f"{value:,}", unit
