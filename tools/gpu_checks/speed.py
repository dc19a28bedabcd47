"""Speed of the 8B shapes against the device's own ceilings, by tools/bench/speed_of_light.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import speed_of_light
import torch
from light.machine import measure
from light.measures import lines

from gpu_checks.context import Context
from gpu_checks.registry import OK, Result, Target, Unavailable, check

DECODE_SHARE, IDLE_SHARE, SLICES_SHARE = 0.8, 0.03, 0.5
ENOUGH_BYTES = 36 << 30
"""Device memory in which every shape has room: 16 GiB of weights, a cache, and the peer's activations."""
FEWER = speed_of_light.Sizes(batches=(1, 16, 64), steps=24, prompts=(4096,), shares=(0.5,))
"""With --quick."""


def _targets(rows: list[Any], name: str) -> list[Target]:
    targets = []
    for row in rows:
        if row.get("batch", 1000) <= 64 and "share" in row and row["what"].startswith("decode"):
            targets.append(Target(f"{name} {row['what']}, share of copy bandwidth", row["share"], DECODE_SHARE))
        if row.get("mode") == "offload" and "share" in row:
            targets.append(Target(f"{name} {row['what']}, share of a pinned copy", row["share"], DECODE_SHARE))
        if row["what"].startswith("idle"):
            targets.append(
                Target(f"{name} {row['what']}, share of the trace", row["share"], IDLE_SHARE, at_least=False)
            )
    return targets


@contextlib.contextmanager
def _fits(ctx: Context, name: str) -> Iterator[None]:
    """A device that is too small for the shape fails nothing."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        total = ctx.cuda.mem_get_info()[1]
        if total >= ENOUGH_BYTES:
            raise
        raise Unavailable(f"{name} does not fit a device of {total / 2**30:.0f} GiB: {error}") from None


def _measured(ctx: Context, name: str) -> Result:
    ceilings = measure(ctx.device)
    small, sizes = speed_of_light.SMALL, FEWER if ctx.quick else speed_of_light.Sizes()
    if ctx.rehearse:
        name, sizes = f"tiny-{name.split('-')[0]}", dataclasses.replace(small, batches=(2,), prompts=(40,))
    with _fits(ctx, name):
        rows = speed_of_light.measure_shape(name, ctx.device, ceilings, sizes)
    speed_of_light.give_back()
    shown = [str(ceilings), *lines(rows)]
    best = max((row["share"] for row in rows if row["what"].startswith("decode")), default=0.0)
    figure = f"decode at {best:.0%} of copy bandwidth at best"
    return Result(OK, figure, targets=_targets(rows, name), details={"rows": rows, "table": shown})


@check(
    "speed_llama_8b",
    group="speed",
    promise="decode, prefill, mixed steps and suspends of the Llama-3-8B shape",
    budget_s=80,
)
def llama(ctx: Context) -> Result:
    return _measured(ctx, "llama-8b")


@check(
    "speed_slices",
    group="speed",
    promise="attention of 32 queries over 64k keys of 1 and of 8 rows, against the copy of the keys",
    budget_s=30,
)
def slices(ctx: Context) -> Result:
    ceilings = measure(ctx.device)
    sizes = speed_of_light.SMALL if ctx.rehearse else speed_of_light.Sizes()
    rows = speed_of_light.measure_slices(ctx.device, ceilings, sizes)
    speed_of_light.give_back()
    if not rows:
        raise Unavailable("Triton's attention is not there")
    targets = [Target(f"{row['what']}, share of copy bandwidth", row["share"], SLICES_SHARE) for row in rows]
    figure = ", ".join(f"{row['rows']} rows at {row['share']:.0%}" for row in rows) + " of copy bandwidth"
    return Result(OK, figure, targets=targets, details={"rows": rows, "table": [str(ceilings), *lines(rows)]})


@check("speed_hybrid_8b", group="speed", promise="the same of a hybrid 8B shape", budget_s=90, long=True)
def hybrid(ctx: Context) -> Result:
    return _measured(ctx, "hybrid-8b")


@check(
    "speed_peer",
    group="speed",
    promise="transformers' generate on the Llama-3-8B shape in the same process, for comparison",
    budget_s=60,
    long=True,
    needs=("transformers", "tokenizers", "safetensors"),
)
def peer(ctx: Context) -> Result:
    try:
        import transformers
    except ImportError as reason:
        raise Unavailable(f"transformers: {reason}") from None
    sizes = speed_of_light.SMALL if ctx.rehearse else speed_of_light.Sizes(batches=(1, 16, 64))
    name = ctx.pick("llama-8b", "tiny-llama")
    with _fits(ctx, name):
        rows = speed_of_light.measure_peer(name, ctx.device, sizes, dict.fromkeys(sizes.batches, float("nan")))
    speed_of_light.give_back()
    figure = ", ".join(f"{row['what'].split('generate ')[1]}: {row['ms']:.2f} ms" for row in rows)
    rows = [{key: value for key, value in row.items() if key != "faster"} for row in rows]
    details = {"rows": rows, "version": transformers.__version__, "table": lines(rows)}
    return Result(OK, figure, details=details)
