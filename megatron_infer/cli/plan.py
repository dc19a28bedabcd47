"""`megatron-infer plan`: the sizes that follow from a model, the options and the memory, with no weight loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.options import add_config_options, config_from
from megatron_infer.config import InferenceConfig, ModelShape, ResolvedSizes
from megatron_infer.context.layout import GIB, heads_per_rank
from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.models.model_plan import ModelPlan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="the sizes that follow from a model, the options and the memory",
        description="Resolve every size of an engine from the model's description alone: bytes per block, blocks, "
        "requests, tokens. No weights are loaded. The same options give generate and chat the same sizes.",
    )
    parser.add_argument("model", metavar="MODEL", help="alias (smollm2), directory, hub id, .gguf file or checkpoint")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default auto)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share a model (1)")
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=None,
        metavar="GIB",
        help="plan for so much free memory, not this machine's",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_infer.forward.device import Device, choose_dtype
    from megatron_infer.models.sources import open_source

    if args.memory_gb is not None and not args.memory_gb > 0:
        raise ConfigError(f"--memory-gb is {args.memory_gb}, it must be above 0")
    if args.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size is {args.tensor_parallel_size}, it must be at least 1")
    device = Device(args.device)
    config = config_from(args)
    plan = open_source(args.model).config()
    dtype = str(choose_dtype(args.dtype, device)).removeprefix("torch.")
    shape = shape_of(plan, dtype=dtype, tensor_parallel_size=args.tensor_parallel_size)
    available = int(args.memory_gb * GIB) if args.memory_gb is not None else device.available_bytes()
    sizes = config.resolve(shape, tensor_parallel_size=args.tensor_parallel_size, available_bytes=available)
    if args.json:
        print(json.dumps(as_dict(config, shape, sizes), indent=2))
    else:
        _print_table(args.model, config, shape, sizes)
    return 0


def shape_of(plan: ModelPlan, *, dtype: str, tensor_parallel_size: int = 1) -> ModelShape:
    """The share of one rank in a model that has not been built."""
    layers = plan.transformer
    heads = layers["num_attention_heads"]
    kv_heads = layers.get("num_query_groups") or heads
    if heads % tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {tensor_parallel_size}, it must divide the {heads} attention heads of the model"
        )
    padded = -(-plan.vocab_size // tensor_parallel_size) * tensor_parallel_size
    return ModelShape(
        num_layers=layers["num_layers"],
        num_attention_layers=layers["num_layers"],
        num_query_heads=heads // tensor_parallel_size,
        num_kv_heads=heads_per_rank(kv_heads, tensor_parallel_size),
        head_dim=layers["kv_channels"],
        hidden_size=layers["hidden_size"],
        vocab_size=plan.vocab_size,
        padded_vocab_size=padded,
        max_position=plan.max_sequence_length,
        kv_dtype_bytes=DTYPE_BYTES[dtype],
        dtype=dtype,
        num_parameters=num_parameters(plan),
    )


def num_parameters(plan: ModelPlan) -> int:
    """Parameters of the whole model, counted from its description. Example: SmolLM2-135M -> 134,515,008."""
    layers = plan.transformer
    hidden, ffn, heads = layers["hidden_size"], layers["ffn_hidden_size"], layers["num_attention_heads"]
    head_dim, kv_heads = layers["kv_channels"], layers.get("num_query_groups") or heads
    qkv, ffn_in = (heads + 2 * kv_heads) * head_dim, ffn * (2 if layers.get("gated_linear_unit") else 1)
    norm = hidden * (2 if layers.get("normalization", "LayerNorm") == "LayerNorm" else 1)
    layer = qkv * hidden + heads * head_dim * hidden + ffn_in * hidden + ffn * hidden + 2 * norm
    layer += sum({"qkv": qkv, "proj": hidden, "fc1": ffn_in, "fc2": hidden}[name] for name in _biases(layers, plan))
    if layers.get("qk_layernorm"):
        layer += 2 * head_dim
    embeddings = plan.vocab_size * hidden * (1 if plan.tied_embeddings else 2)
    positions = plan.max_sequence_length * hidden if plan.position_embedding == "learned_absolute" else 0
    return layers["num_layers"] * layer + embeddings + positions + norm


def _biases(layers: Mapping[str, Any], plan: ModelPlan) -> tuple[str, ...]:
    """Linears that hold a bias once built: megatron-core gives one to all of them or to qkv alone."""
    if layers.get("add_bias_linear"):
        return ("qkv", "proj", "fc1", "fc2")
    return ("qkv",) if layers.get("add_qkv_bias") or "qkv" in plan.linear_biases else ()


def as_dict(config: InferenceConfig, shape: ModelShape, sizes: ResolvedSizes) -> dict[str, Any]:
    model = {name: getattr(shape, name) for name in ModelShape.__dataclass_fields__}
    return {"config": config.to_dict(), "model": model, "sizes": {row.name: row._asdict() for row in sizes.table()}}


def _print_table(name: str, config: InferenceConfig, shape: ModelShape, sizes: ResolvedSizes) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    weights = shape.num_parameters * shape.kv_dtype_bytes
    title = f"{name}: {shape.num_parameters / 1e6:,.1f} M parameters, {shape.dtype}, {weights / GIB:.2f} GiB of weights"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("size", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("how it was derived")
    for row in sizes.table():
        value, unit = _readable(row.value, row.unit)
        table.add_row(row.name, value, unit, Text(row.how, style="dim"))
    console = Console()
    console.print(table)
    changed = {key: value for key, value in config.to_dict().items() if value != InferenceConfig().to_dict()[key]}
    console.print(Text("options away from their defaults: " + ", ".join(f"{k}={v}" for k, v in changed.items())))


def _readable(value: int | str, unit: str) -> tuple[str, str]:
    if isinstance(value, str):
        return value, unit
    if unit == "bytes" and value >= 1 << 20:
        return f"{value:,}", f"bytes ({value / (1 << 20):,.1f} MiB)"
    return f"{value:,}", unit
