"""Speed of the 8B shapes against the device's own ceilings, by tools/bench/speed_of_light.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import speed_of_light
from light.machine import measure
from light.measures import lines

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, Target, check

DECODE_SHARE, COPY_SHARE, IDLE_SHARE = 0.8, 0.8, 0.03
FEWER = speed_of_light.Sizes(batches=(1, 16, 64), steps=24, prompts=(4096,), shares=(0.5,))
"""With --quick."""


def _targets(rows: list[Any], name: str) -> list[Target]:
    targets = []
    for row in rows:
        if row.get("batch", 1000) <= 64 and "share" in row and row["what"].startswith("decode"):
            targets.append(Target(f"{name} {row['what']}, share of copy bandwidth", row["share"], DECODE_SHARE))
        for way in ("share", "resume_share"):
            if row.get("mode") == "offload" and way in row:
                targets.append(Target(f"{name} {row['what']}, {way} of a pinned copy", row[way], COPY_SHARE))
        if row["what"].startswith("idle"):
            targets.append(
                Target(f"{name} {row['what']}, share of the trace", row["share"], IDLE_SHARE, at_least=False)
            )
    return targets


def _measured(ctx: Context, compare: Comparison, name: str) -> dict[str, Any]:
    ceilings = measure(ctx.device)
    small, sizes = speed_of_light.SMALL, FEWER if ctx.quick else speed_of_light.Sizes()
    if ctx.rehearse:
        name, sizes = f"tiny-{name.split('-')[0]}", dataclasses.replace(small, batches=(2,), prompts=(40,))
    rows = speed_of_light.measure_shape(name, ctx.device, ceilings, sizes)
    speed_of_light.give_back()
    best = max((row["share"] for row in rows if row["what"].startswith("decode")), default=0.0)
    compare.figure = f"decode at {best:.0%} of copy bandwidth at best"
    compare.targets = _targets(rows, name)
    return {"rows": rows, "table": [str(ceilings), *lines(rows)]}


@check(budget_s=80)
def speed_llama_8b(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Decode, prefill, mixed steps and suspends of the Llama-3-8B shape."""
    return _measured(ctx, compare, "llama-8b")


@check(budget_s=90, long=True)
def speed_hybrid_8b(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """The same of a hybrid 8B shape."""
    return _measured(ctx, compare, "hybrid-8b")
