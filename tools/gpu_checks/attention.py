"""Paged attention of every accelerated backend against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from paged_case import Case, make_case
from step_rows import CPU, Row
from torch import Tensor

from gpu_checks.context import Context, error_of
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention, rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of the largest entry. Inputs are the rounded ones, so this is the kernel's own rounding: that of its output, and of
the probabilities where they are multiplied in 16 bits."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 64, 256)

LATENT: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_dim": 576,
    "rotary_dim": 64,
    "value_start": 64,
    "interleaved": True,
}
"""Latent attention in DeepSeek-V3's widths."""

DECODE: list[Row] = [(1, 1), (1, 16), (1, 17), (1, 300), (1, 1500)]
PREFILL: list[Row] = [(1, 1), (7, 7), (130, 130), (64, 260), (33, 1033), (5, 3000)]
MIXED: list[Row] = [(1, 5), (1, 700), (40, 40), (1, 90), (129, 400)]
SMALL_DECODE: list[Row] = [(1, 1), (1, 21)]
SMALL_MIXED: list[Row] = [(1, 18), (5, 5), (3, 19)]
Steps = dict[str, tuple[list[Row], int]]
"""Name -> (rows, how many of them decode)."""
ERROR = "error over the largest entry"


def _settings(ctx: Context) -> Iterator[dict[str, Any]]:
    """Shapes of layers: each head dim, block size and feature, and some of them together."""
    if ctx.rehearse:
        yield {"head_dim": 16, "group_size": 2, "num_kv_heads": 1, "rotary_dim": 8}
        yield {"head_dim": 16, "group_size": 1, "num_kv_heads": 1, "window": 5, "sinks": True}
        yield LATENT | {"head_dim": 24, "rotary_dim": 8, "value_start": 8}
        return
    yield from ({"head_dim": dim, "rotary_dim": dim} for dim in HEAD_DIMS)
    yield from ({"block_size": size, "head_dim": 128} for size in BLOCK_SIZES)
    yield from ({"group_size": size} for size in (1, 3, 8, 16))
    yield {"window": 37, "rotary_dim": 32}
    yield {"window": 1}
    yield {"sinks": True, "head_dim": 64}
    yield {"sinks": True, "window": 128, "group_size": 8, "rotary_dim": 64}
    yield {"rotary_dim": 32, "interleaved": True, "head_dim": 96}
    yield from (LATENT | {"group_size": size} for size in (16, 40))


def oracle(case: Case, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out [T, N*H], cache afterwards) in float64 on the CPU, by definition.

    kept: attend to this cache as it is after the step; None: to one with this step's keys rounded to their dtype.
    """
    kept = None if kept is None else kept.cpu().double()
    case = case.on(CPU)
    spec, meta, layer, cache = case.spec, case.meta, case.layer, case.kv_cache.double() if kept is None else kept
    q, k, v = (part.double() for part in case.parts(case.fused))
    if spec.rotary_dim:
        turn = {"dim": spec.rotary_dim, "interleaved": spec.rotary_interleaved}
        q, k = (rotate(x, meta.cos_TR, meta.sin_TR, **turn) for x in (q, k))
    if kept is None:
        k = k.to(case.fused.dtype).double()
    else:
        k, v = (part.flatten(0, 1)[meta.kv_pos_T] for part in cache[layer])
    backend = ReferenceAttention()
    backend.plan(meta)
    return backend.run(q, k, v, cache, layer=layer, spec=replace(spec, rotary_dim=0)), cache


def _hold(ctx: Context, compare: Comparison, steps: Steps) -> dict[str, Any]:
    """Every backend, dtype and setting on these steps."""
    refused: set[str] = set()
    for dtype in ctx.dtypes():
        for number, settings in enumerate(_settings(ctx)):
            # Every kernel is compiled first: all settings in bf16, every other one in each of the others.
            if not ctx.rehearse and dtype != torch.bfloat16 and number % 2 != (dtype == torch.float32):
                continue
            for name, (rows, num_decode) in steps.items():
                sizes = {"group_size": 4} | settings
                case = make_case(rows, num_decode=num_decode, dtype=dtype, device=ctx.device, **sizes)
                refused |= _compare(ctx, compare, case, f"{dtype} {name} {settings}")
    return {"refused": sorted(refused)}


def _compare(ctx: Context, compare: Comparison, case: Case, label: str) -> set[str]:
    """Each backend that takes the case; of the others the reasons."""
    dtype, refused = case.fused.dtype, set()
    wanted, wanted_cache = oracle(case)
    for backend in ctx.backends(backend_candidates.ATTENTION, dtype):
        reason = backend.supports(case.spec, dtype=dtype, block_size=case.kv_cache.shape[3])
        if reason is not None:
            refused.add(f"{backend.name}: {reason}")
            continue
        out, cache = case.run(backend)
        where = f"{backend.name} {label}"
        compare.add(where, error_of(out, wanted), TOLERANCE[dtype])
        compare.add(f"{where}, kept keys", error_of(cache[1, :, :-1], wanted_cache[1, :, :-1]), TOLERANCE[dtype])
        compare.require(f"{where}: another layer's cache changed", bool(torch.equal(cache[0], case.kv_cache[0])))
    return refused


@check(budget_s=100, what=ERROR)
def attention_decode(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Paged decode attention equals its definition: head dims 64 to 256, blocks 16 to 256, GQA, windows, latents."""
    rows = ctx.pick(DECODE, SMALL_DECODE)
    return _hold(ctx, compare, {"decode": (rows, len(rows))})


@check(budget_s=120, what=ERROR)
def attention_mixed(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Ragged prefill, and decode and prefill rows in one step, equal their definition."""
    steps: Steps = {"prefill": (PREFILL, 0), "mixed": (MIXED, 2)}
    return _hold(ctx, compare, ctx.pick(steps, {"mixed": (SMALL_MIXED, 1)}))


@check(budget_s=15)
def attention_company(ctx: Context, compare: Comparison) -> None:
    """The bits of a row's attention depend on that row alone: not on company, padding or capacity."""
    rows, num_decode = ctx.pick((MIXED, 2), (SMALL_MIXED, 1))
    for dtype in ctx.dtypes():
        # The package's own kernels: others split rows by the batch.
        backend = next((one for one in ctx.backends(backend_candidates.ATTENTION, dtype) if one.name == "triton"), None)
        if backend is None:
            raise Unavailable("Triton's attention is not there")
        make = partial(make_case, rows, num_decode=num_decode, dtype=dtype, device=ctx.device, **next(_settings(ctx)))
        plain = make()
        out, _ = plain.run(backend)
        again, _ = plain.run(backend)
        compare.require(f"{dtype}: a second run has other bits", bool(torch.equal(out, again)))
        padded = make(padding_rows=(3, 2), num_padding=5)
        real = [*range(num_decode), *range(num_decode + 3, num_decode + 3 + out.shape[0] - num_decode)]
        padded.fused[real] = plain.fused
        padded.kv_cache.copy_(plain.kv_cache)
        for name in ("cos_TR", "sin_TR"):
            if getattr(padded.meta, name) is not None:
                getattr(padded.meta, name)[real] = getattr(plain.meta, name)
        padded.meta.max_kv_len *= 2
        padded.meta.max_q_len += 9
        wide, _ = padded.run(backend)
        compare.require(f"{dtype}: padding changes bits", bool(torch.equal(wide[real], out)))
        compare.require(f"{dtype}: padding is not finite", bool(wide.isfinite().all()))
