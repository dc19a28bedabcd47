"""`megatron-infer plan --roofline`: what a GPU can do at most with a model's steps, by its published limits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from megatron_infer.cli.config_flags import ENGINE_PREFIXES, flags_given, given
from megatron_infer.cli.loading import run_options
from megatron_infer.cli.pipeline_flags import pipeline_values
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import RunOptions
from megatron_infer.config.model_shape import FP8_E4M3, KV_DTYPE_BYTES
from megatron_infer.config.step_work import LAUNCH_GAP_US, PUBLISHED, PUBLISHED_SOURCE, Ceiling, StepCounter, StepWork
from megatron_infer.errors import ConfigError

DTYPE = "bfloat16"
"""The dtype of the published arithmetic."""
BATCH, CONTEXT = 1, 1024
NAMES = "h100, h200 or b200"


def add_roofline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("roofline", "bytes, FLOPs and launches of a step, and the time at a GPU's limits")
    group.add_argument(
        "--roofline", action="store_true", help=f"print them for --device {NAMES} instead of sizes; needs no GPU"
    )
    group.add_argument("--batch", type=int, default=None, metavar="N", help=f"requests of the decode step ({BATCH})")
    group.add_argument(
        "--context",
        type=int,
        default=None,
        metavar="N",
        help=f"tokens that each of them attends to, and tokens of the prompt of the prefill step ({CONTEXT})",
    )


def wants_roofline(args: argparse.Namespace) -> bool:
    """Raises ConfigError for what means nothing without --roofline."""
    if args.roofline:
        return True
    for name in ("batch", "context"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is an option of --roofline; add it, or leave --{name} out")
    device = RunOptions(**run_options(args)).device
    if device in PUBLISHED:
        raise ConfigError(f"--device {device} is known to --roofline only; add it, or give cpu, cuda or cuda:N")
    return False


def show_roofline(args: argparse.Namespace) -> None:
    """Print both steps of a command line, as tables or as JSON. Raises ConfigError, ModelError."""
    device, batch, context = RunOptions(**run_options(args)).device, *_sizes(args)
    if device not in PUBLISHED:
        raise ConfigError(f"--device is {device}, with --roofline it must be {NAMES}")
    counter = _counter(args)
    longest = counter.shape.max_position
    if longest is not None and context > longest:
        raise ConfigError(f"--context is {context:,}, the model has {longest:,} positions; lower it")
    ceiling = PUBLISHED[device]
    steps = {
        f"decode, {batch:,} x 1 token, {context:,} keys each": counter.decode(batch, context),
        f"prefill, 1 x {context:,} tokens": counter.prefill(context),
    }
    if args.json:
        print(json.dumps(_as_dict(steps, device, ceiling), indent=2))
        return
    for title, work in steps.items():
        _print(f"{args.model} on {device}: {title}", work, ceiling)
    print(f"Limits by {PUBLISHED_SOURCE}.")
    print(f"With gaps: {LAUNCH_GAP_US:g} us for each launch, an assumption for steps in a CUDA graph.")
    print("Bytes: weights, keys, values, states and logits; activations are not counted.")


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """(batch, context)."""
    sizes = []
    for name, default in (("batch", BATCH), ("context", CONTEXT)):
        value = default if (asked := getattr(args, name)) is None else asked
        if value < 1:
            raise ConfigError(f"--{name} is {value}, it must be at least 1")
        sizes.append(value)
    return sizes[0], sizes[1]


def _counter(args: argparse.Namespace) -> StepCounter:
    from megatron_infer.models.loading.description_shape import step_counter
    from megatron_infer.models.loading.sources import open_source

    if args.model is None:
        raise ConfigError("no model: give MODEL")
    dtype = RunOptions(**run_options(args)).dtype
    if dtype not in ("auto", DTYPE):
        raise ConfigError(f"--dtype is {dtype}, the published limits are those of {DTYPE}; leave it out")
    if flags := sorted(_unused(args)):
        raise ConfigError(
            f"--roofline has no use for {', '.join(flags)}; it takes --batch, --context, --kv-cache-dtype and --json"
        )
    description = open_source(args.model).config()
    plain = step_counter(description, dtype=DTYPE)
    is_fp8 = InferenceConfig(**given(args)).kv_dtype_of(plain.shape) == FP8_E4M3
    return step_counter(description, dtype=DTYPE, kv_element_bytes=KV_DTYPE_BYTES[FP8_E4M3]) if is_fp8 else plain


def _unused(args: argparse.Namespace) -> Iterator[str]:
    """Flags of the command line that change no figure."""
    yield from (flag for name, flag in flags_given(args, ENGINE_PREFIXES) if name != "kv_cache_dtype")
    yield from ("--" + name.replace("_", "-") for name in pipeline_values(args))
    if args.memory_gb is not None:
        yield "--memory-gb"
    if args.tensor_parallel_size != 1:
        yield "--tensor-parallel-size"
    if "threads" in run_options(args):
        yield "--threads"


def _as_dict(steps: dict[str, StepWork], device: str, ceiling: Ceiling) -> dict[str, Any]:
    report: dict[str, Any] = {
        "device": device,
        "bandwidth_gb_s": ceiling.read_gb_s,
        "bf16_gflop_s": ceiling.gemm_gflop_s,
        "source": PUBLISHED_SOURCE,
        "launch_gap_us": LAUNCH_GAP_US,
    }
    for title, work in steps.items():
        parts = [
            {
                "part": part.name,
                "bytes": part.num_bytes,
                "flops": part.flops,
                "launches": part.num_launches,
                "seconds": ceiling.seconds(part.num_bytes, part.flops),
            }
            for part in work.parts
        ]
        report[title.split(",")[0]] = {
            "step": title,
            "parts": parts,
            "bytes": work.num_bytes,
            "flops": work.flops,
            "launches": work.num_launches,
            "seconds": work.seconds(ceiling),
            "seconds_with_gaps": work.seconds(ceiling, gap_us=LAUNCH_GAP_US),
        }
    return report


def _print(title: str, work: StepWork, ceiling: Ceiling) -> None:
    lines = [title, f"  {'part':<32} {'MB':>12} {'GFLOP':>12} {'launches':>9} {'ms':>9}  bound by"]
    for part in work.parts:
        moves, computes = ceiling.seconds(part.num_bytes, 0), ceiling.seconds(0, part.flops)
        figures = _figures(part.num_bytes, part.flops, part.num_launches, max(moves, computes))
        lines.append(f"  {part.name:<32} {figures}  {'arithmetic' if computes > moves else 'memory'}")
    lines.append(f"  {'all':<32} {_figures(work.num_bytes, work.flops, work.num_launches, work.seconds(ceiling))}")
    gaps = work.seconds(ceiling, gap_us=LAUNCH_GAP_US)
    lines.append(f"  {'with gaps between launches':<32} {'':>12} {'':>12} {'':>9} {gaps * 1e3:9.3f}")
    print("\n".join(lines) + "\n")


def _figures(num_bytes: int, flops: int, launches: int, seconds: float) -> str:
    return f"{num_bytes / 1e6:12,.1f} {flops / 1e9:12,.1f} {launches:9,} {seconds * 1e3:9.3f}"
