"""Paged attention of every accelerated backend against its definition in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, Result, Unavailable, check
from gpu_checks.steps import Padding, Row, attention_case, attention_oracle, error_of
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.base import GraphSupport

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of the largest entry. Inputs are the rounded ones, so this is the kernel's own rounding: that of its output, and of
the probabilities where they are multiplied in 16 bits."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 64, 256)

DECODE: list[Row] = [(1, 1), (1, 16), (1, 17), (1, 300), (1, 1500)]
PREFILL: list[Row] = [(1, 1), (7, 7), (130, 130), (64, 260), (33, 1033)]
MIXED: list[Row] = [(1, 5), (1, 700), (40, 40), (1, 90), (129, 400)]
SLICES: list[Row] = [(32, 9000), (5, 3000), (100, 2500), (1, 1200), (3, 40), (700, 1500)]
"""Few queries over many keys, which are cut, and among them a row that has few keys, too."""
SMALL_DECODE: list[Row] = [(1, 1), (1, 21)]
SMALL_MIXED: list[Row] = [(1, 18), (5, 5), (3, 19)]
SMALL_SLICES: list[Row] = [(3, 1030)]


def _settings(ctx: Context) -> Iterator[dict[str, Any]]:
    """Shapes of layers: each head dim, block size and feature, and some of them together."""
    if ctx.rehearse:
        yield {"head_dim": 16, "group_size": 2, "num_kv_heads": 1, "rotary_dim": 8}
        yield {"head_dim": 16, "group_size": 1, "num_kv_heads": 1, "window": 5, "sinks": True}
        return
    yield from ({"head_dim": dim, "rotary_dim": dim} for dim in HEAD_DIMS)
    yield from ({"block_size": size, "head_dim": 128} for size in BLOCK_SIZES)
    yield from ({"group_size": size} for size in (1, 3, 8, 16))
    yield {"window": 37, "rotary_dim": 32}
    yield {"window": 1}
    yield {"sinks": True, "head_dim": 64}
    yield {"sinks": True, "window": 128, "group_size": 8, "rotary_dim": 64}
    yield {"rotary_dim": 32, "interleaved": True, "head_dim": 96}


def _slice_settings(ctx: Context) -> Iterator[dict[str, Any]]:
    """Those of layers whose rows' keys are cut: dims, groups of several tiles, windows, sinks."""
    if ctx.rehearse:
        yield {"head_dim": 16, "group_size": 2, "num_kv_heads": 1}
        return
    yield from ({"head_dim": dim, "rotary_dim": dim} for dim in (64, 96, 128, 256))
    yield {"head_dim": 128, "num_kv_heads": 8, "block_size": 64}
    yield {"group_size": 3, "num_kv_heads": 1, "sinks": True}
    yield {"window": 1700, "sinks": True, "head_dim": 64, "group_size": 8}


def _hold(
    ctx: Context,
    steps: dict[str, tuple[list[Row], int]],
    settings_of: Callable[[Context], Iterator[dict[str, Any]]] = _settings,
) -> Result:
    """Every backend, dtype and setting on these steps: name -> (rows, how many of them decode)."""
    compare = Comparison("error over the largest entry")
    refused: set[str] = set()
    for dtype in ctx.dtypes():
        for backend in ctx.backends(backend_candidates.ATTENTION, dtype):
            for number, settings in enumerate(settings_of(ctx)):
                # Every kernel is compiled first: all settings in bf16, every other one in each of the others.
                if not ctx.rehearse and dtype != torch.bfloat16 and number % 2 != (dtype == torch.float32):
                    continue
                for name, (rows, num_decode) in steps.items():
                    case = attention_case(rows, ctx.device, dtype, num_decode=num_decode, **settings)
                    reason = backend.supports(case.spec, dtype=dtype, block_size=case.kv_cache.shape[3])
                    if reason is not None:
                        refused.add(f"{backend.name}: {reason}")
                        continue
                    _compare(compare, case, backend, f"{backend.name} {dtype} {name} {settings}")
    return compare.result(refused=sorted(refused))


def _compare(compare: Comparison, case: Any, backend: Any, label: str) -> None:
    dtype = case.fused.dtype
    (out, cache), (wanted, wanted_cache) = case.run(backend), attention_oracle(case)
    compare.add(label, error_of(out, wanted), TOLERANCE[dtype])
    compare.add(f"{label}, kept keys", error_of(cache[1, :, :-1], wanted_cache[1, :, :-1]), TOLERANCE[dtype])
    compare.require(f"{label}: another layer's cache changed", bool(torch.equal(cache[0], case.kv_cache[0])))


@check(
    "attention_decode",
    group="attention",
    promise="paged decode attention equals its definition: head dims 64 to 256, blocks 16 to 256, GQA, windows, sinks",
    budget_s=100,
)
def decode(ctx: Context) -> Result:
    rows = ctx.pick(DECODE, SMALL_DECODE)
    return _hold(ctx, {"decode": (rows, len(rows))})


@check(
    "attention_mixed",
    group="attention",
    promise="ragged prefill, and decode and prefill rows in one step, equal their definition",
    budget_s=120,
)
def mixed(ctx: Context) -> Result:
    steps = {"prefill": (PREFILL, 0), "mixed": (MIXED, 2)}
    return _hold(ctx, ctx.pick(steps, {"mixed": (SMALL_MIXED, 1)}))


@check(
    "attention_slices",
    group="attention",
    promise="a few queries over many keys, whose keys are cut, equal their definition",
    budget_s=90,
)
def slices(ctx: Context) -> Result:
    return _hold(ctx, {"slices": (ctx.pick(SLICES, SMALL_SLICES), 0)}, _slice_settings)


def _own(ctx: Context, dtype: torch.dtype) -> list[Any]:
    """The package's own kernels: others split rows by the batch."""
    found = [backend for backend in ctx.backends(backend_candidates.ATTENTION, dtype) if backend.name == "triton"]
    if not found:
        raise Unavailable("Triton's attention is not there")
    return found


@check(
    "attention_company",
    group="attention",
    promise="the bits of a row's attention depend on that row alone: not on company, padding or capacity",
    budget_s=15,
)
def company(ctx: Context) -> Result:
    compare = Comparison("difference")
    steps = ctx.pick([(MIXED, 2), (SLICES, 0)], [(SMALL_MIXED, 1)])
    settings = next(_settings(ctx))
    for dtype, (rows, num_decode) in itertools.product(ctx.dtypes(), steps):
        for backend in _own(ctx, dtype):
            plain = attention_case(rows, ctx.device, dtype, num_decode=num_decode, **settings)
            out, _ = plain.run(backend)
            again, _ = plain.run(backend)
            compare.require(f"{backend.name} {dtype}: a second run has other bits", bool(torch.equal(out, again)))
            padding = Padding(num_decode=3, num_prefill=2, num_tokens=5)
            padded = attention_case(rows, ctx.device, dtype, num_decode=num_decode, padding=padding, **settings)
            real = [*range(num_decode), *range(num_decode + 3, num_decode + 3 + out.shape[0] - num_decode)]
            padded.fused[real] = plain.fused
            padded.kv_cache.copy_(plain.kv_cache)
            for name in ("cos_TR", "sin_TR"):
                if getattr(padded.step, name) is not None:
                    getattr(padded.step, name)[real] = getattr(plain.step, name)
            padded.step.max_kv_len *= 2
            padded.step.max_q_len += 9
            wide, _ = padded.run(backend)
            compare.require(f"{backend.name} {dtype}: padding changes bits", bool(torch.equal(wide[real], out)))
            compare.require(f"{backend.name} {dtype}: padding is not finite", bool(wide.isfinite().all()))
    return compare.result()


@check(
    "attention_random",
    group="attention",
    promise="random steps of random layers, padded or not, equal their definition",
    budget_s=100,
    long=True,
)
def randomly(ctx: Context) -> Result:
    compare, rng = Comparison("error over the largest entry"), random.Random(1)
    for number in range(ctx.pick(40, 1)):
        dtype = ctx.dtypes()[number % len(ctx.dtypes())]
        longest, dims = ctx.pick(600, 20), ctx.pick(HEAD_DIMS, (16,))
        num_decode = rng.randint(0, ctx.pick(20, 2))
        rows = [(1, rng.randint(1, longest)) for _ in range(num_decode)]
        for _ in range(rng.randint(0 if rows else 1, ctx.pick(6, 1))):
            kv_len = rng.randint(1, longest)
            rows.append((rng.randint(1, kv_len), kv_len))
        settings: dict[str, Any] = {
            "head_dim": rng.choice(dims),
            "group_size": rng.choice(ctx.pick((1, 2, 5, 8), (2,))),
            "num_kv_heads": rng.choice((1, 2)),
            "block_size": rng.choice(ctx.pick(BLOCK_SIZES, (16,))),
            "window": rng.choice((None, rng.randint(1, longest))),
            "rotary_dim": rng.choice((0, ctx.pick(32, 8))),
            "sinks": rng.random() < 0.3,
            "padding": Padding(rng.randint(0, 3), rng.randint(0, 2), rng.randint(0, 4)),
            "seed": number,
        }
        case = attention_case(rows, ctx.device, dtype, num_decode=num_decode, **settings)
        for backend in ctx.backends(backend_candidates.ATTENTION, dtype):
            if backend.graphs is not GraphSupport.ALL and settings["padding"] != Padding():
                continue
            if backend.supports(case.spec, dtype=dtype, block_size=settings["block_size"]) is None:
                _compare(compare, case, backend, f"{backend.name} {dtype} {rows} {settings}")
    return compare.result()
