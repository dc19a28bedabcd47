"""Calls of the kernels' host functions for layers as models have them, on meta tensors: what each launches is compiled.

A case is a generator, which calls and then yields a label: what was launched since the last one is named by the kernel
and that label. Nothing is computed. `tools/aot_compile.py --cases MODULE` compiles the launches of MODULE.CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from step_rows import moved, step_of
from torch import Tensor

from megatron_infer.kernels.activations import KINDS as ACTIVATIONS
from megatron_infer.kernels.activations import SWIGLU, Form
from megatron_infer.kernels.base import AttendSpec, IndexQueries, IndexSpec, StepMetadata
from megatron_infer.kernels.draw_columns import Column, DrawRoom
from megatron_infer.kernels.experts import ExpertChoice, ExpertWeights, RoutingRules
from megatron_infer.kernels.kv_rounding import FP8
from megatron_infer.kernels.ssm import DeltaSpec, LayerStates, RecurrentSpec, SsmSpec, SsmWeights
from megatron_infer.kernels.step_gather import StepTables
from megatron_infer.kernels.triton import routing
from megatron_infer.kernels.triton.activations import Activations
from megatron_infer.kernels.triton.attention import LARGE_KIB, SMALL_KIB, TritonPagedAttention
from megatron_infer.kernels.triton.elementwise import TritonOps
from megatron_infer.kernels.triton.experts import RECORD, TritonExperts
from megatron_infer.kernels.triton.launch import APART, DTYPES
from megatron_infer.kernels.triton.lora import TritonLoRA
from megatron_infer.kernels.triton.norms import TritonNorms
from megatron_infer.kernels.triton.sampling import TritonSampling
from megatron_infer.kernels.triton.scan import TritonScan
from megatron_infer.kernels.triton.sparse_attention import TritonSparseAttention
from megatron_infer.kernels.triton.step_gather import gather
from megatron_infer.kernels.triton_scratch import LARGE_SHARED_KIB

META = torch.device("meta")
FP32, BF16, FP16, INT32, INT64 = torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64
PDL: Mapping[str, bool] = {"PDL": True, "launch_pdl": True}
KINDS = [*((APART, dtype, name) for dtype, name in DTYPES.items()), (PDL, BF16, "bf16-pdl")]
"""(options of `launch.overlapping`, dtype, its label): models that overlap launches run in bf16."""


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def step_for(*rows: tuple[int, int], **fields: Any) -> StepMetadata:
    """One decode row and slices, each (q_len, kv_len), with all its tensors on meta."""
    step = step_of(rows, num_decode=1, table_row=range(len(rows)), captures=fields.pop("captures", ()))
    places = {"positions_T": meta(step.num_tokens, dtype=INT64), "kv_pos_T": meta(step.num_tokens, dtype=INT64)}
    return moved(replace(step, **places, **fields), META)


# ---------------------------------------------------------------------- norms, activations, gathers


def norms() -> Iterator[str]:
    """RMS and layer norms of narrow and wide rows, of heads, zero-centered ones and after a sum."""
    cases = {
        # width, centered, zero_centered, weight, bias, add
        "rms": (4096, False, False, True, False, False),
        "add_rms": (4096, False, False, True, False, True),
        "add_rms_narrow": (80, False, False, True, False, True),
        "add_rms_wide": (20480, False, False, True, False, True),
        "rms_wide": (20480, False, False, True, False, False),
        "layer": (4096, True, False, True, True, False),
        "layer_no_bias": (4096, True, False, True, False, False),
        "layer_wide": (20480, True, False, True, True, False),
        "heads": (128, False, False, True, False, False),
        "heads_layer": (80, True, False, True, True, False),
        "l2": (64, False, False, False, False, False),
        "l2_wide": (20480, False, False, False, False, False),
        "zero_centered": (4096, False, True, True, False, False),
        "zero_centered_wide": (20480, False, True, True, False, False),
        "zero_centered_layer": (4096, True, True, True, True, False),
        "add_zero_centered": (4096, False, True, True, False, True),
        "add_layer": (8192, True, False, True, True, True),
        "add_layer_no_bias": (20480, True, True, True, False, True),
    }
    for overlap, dtype, kind in KINDS:
        norm = TritonNorms(overlap).norm
        for name, (width, centered, zero_centered, has_weight, has_bias, adds) in cases.items():
            vector = meta(width, dtype=dtype)
            for kept in dict.fromkeys((FP32, dtype)) if adds else (dtype,):
                norm(
                    meta(8, width, dtype=dtype),
                    vector if has_weight else None,
                    vector if has_bias else None,
                    1e-5,
                    centered=centered,
                    zero_centered=zero_centered,
                    residual=meta(8, width, dtype=kept) if adds else None,
                )
                yield f"{name}-{DTYPES[kept]}-{kind}"


def activations() -> Iterator[str]:
    """Gates at a narrow width, a usual one and a wide one; each activation alone and gated, and as experts scale it."""
    for overlap, dtype, kind in KINDS:
        ops, run = TritonOps(overlap), Activations(overlap).run
        for width in (80, 4096, 20480):
            x = meta(8, width, dtype=dtype)
            for weight in (meta(width, dtype=dtype), meta(width), None):
                ops.gated_rms_norm(x, x, weight, 1e-5, group_size=width)
                yield f"{width}-{weight is not None}-{kind}"
            ops.sigmoid_mul(x, x)
            yield f"{width}-sigmoid-{kind}"
        x = meta(8, 2048, dtype=dtype)
        for number in ACTIVATIONS.values():
            for form in (Form(number), Form(number, gated=True), Form(number, gated=True, clamp=7.0)):
                run(form, x)
                yield f"{number}-{'gated' if form.gated else 'plain'}{'-clamped' * (form.clamp is not None)}-{kind}"
        run(SWIGLU, x, meta(8, RECORD, dtype=INT32))
        yield f"scaled-{kind}"


def gathers() -> Iterator[str]:
    """The rotary dims that models have, and none."""
    each, table = meta(8, dtype=INT32), meta(8, 64, dtype=INT32)
    gather(each, each, StepTables(table, table, 16, None, None))
    yield "no_rotary"
    for dtype, kind in DTYPES.items():
        for dims in (64, 128, 256):
            angles = meta(64, dims, dtype=dtype)
            gather(each, each, StepTables(table, table, 16, angles, angles))
            yield f"{kind}-r{dims}"


# ---------------------------------------------------------------------- attention


SINKS: dict[str, Any] = {"sinks": lambda: meta(64)}
TURNED: dict[str, Any] = {"rotary_dim": 64, "rotary_interleaved": True}
LAYERS: dict[str, tuple[int, int, int, int, dict[str, Any], tuple[torch.dtype, ...]]] = {
    # kv heads, query heads of each, head dim, block size, more of the layer, dtypes of queries over FP8
    "h128_g4": (8, 4, 128, 16, {"rotary_dim": 128}, (BF16, FP16, FP32)),
    "h128_g4_block256": (8, 4, 128, 256, {}, ()),
    "h64_g8_window_sinks": (8, 8, 64, 16, {"window": 128, **SINKS}, (BF16,)),
    "h64_g8_sinks": (8, 8, 64, 16, SINKS, ()),
    "h256_g8": (1, 8, 256, 64, TURNED, (BF16,)),
    "h256_g2_window_softcap": (4, 2, 256, 16, {"window": 4096, "softcap": 50.0}, ()),
    "h80_g1": (32, 1, 80, 32, {"rotary_dim": 32}, (BF16, FP16, FP32)),
    "h112_g3_window": (4, 3, 112, 16, {"window": 1024}, ()),
    "h64_g3": (3, 3, 64, 16, TURNED, ()),
    "h128_g128": (1, 128, 128, 128, {}, ()),
    "h16_g2": (2, 2, 16, 16, {}, ()),
    "latent512_g16": (1, 16, 576, 64, {"value_start": 64, **TURNED}, (BF16, FP16)),
    "latent512_g128": (1, 128, 576, 16, {"value_start": 64, **TURNED}, ()),
}


def attention(shared_kib: int) -> Iterator[str]:
    """Head dims, groups, block sizes, windows and sinks, on a device with so much shared memory; FP8."""
    for overlap, dtype, kind in KINDS:
        backend = TritonPagedAttention(num_cores=132, shared_kib=shared_kib, overlap=overlap)
        for name, (num_kv, group, head_dim, block_size, more, fp8_dtypes) in LAYERS.items():
            spec = AttendSpec(num_kv_heads=num_kv, group_size=group, head_dim=head_dim, scale=0.1, **more)
            angles = meta(65, spec.rotary_dim, dtype=dtype)
            table = meta(2, 8192 // block_size, dtype=INT32)
            backend.plan(step_for((1, 8192), (64, 64), block_table=table, cos_TR=angles, sin_TR=angles))
            for kept in (dtype, FP8) if dtype in fp8_dtypes else (dtype,):
                q, k = meta(65, num_kv, group, head_dim, dtype=dtype), meta(65, num_kv, head_dim, dtype=dtype)
                cache = meta(1, spec.planes, 512, block_size, num_kv, head_dim, dtype=kept)
                assert backend.supports(spec, dtype=dtype, block_size=block_size, kv_dtype=kept) is None
                backend.run(q, k, k, cache, layer=0, spec=spec)
                yield f"{name}{'-fp8' if kept is FP8 else ''}-{kind}{'-large' if shared_kib == LARGE_KIB else ''}"


def sparse_attention(shared_kib: int) -> Iterator[str]:
    """DeepSeek-V3.2's indexer and its attention to chosen keys, on a device with so much shared memory."""
    indexer = IndexSpec(num_heads=64, dim=128, top_k=2048, rotary_dim=64, rotary_interleaved=False)
    latent = {"head_dim": 704, "value_start": 64, **TURNED}
    spec = AttendSpec(num_kv_heads=1, group_size=16, scale=0.1, index=indexer, **latent)
    for overlap, dtype, kind in KINDS:
        dense = TritonPagedAttention(num_cores=132, shared_kib=shared_kib, overlap=overlap)
        backend, angles, table = TritonSparseAttention(dense), meta(5, 64, dtype=dtype), meta(2, 128, dtype=INT32)
        for kept, relu in ((dtype, True), (FP8, True), (dtype, False))[: 3 if dtype is BF16 else 1]:
            backend.plan(step_for((1, 4096), (4, 4096), block_table=table, cos_TR=angles, sin_TR=angles))
            backend.run_sparse(
                meta(5, 1, 16, 576, dtype=dtype),
                meta(5, 1, 704, dtype=dtype),
                meta(1, 1, 128, 64, 1, 704, dtype=kept),
                layer=0,
                spec=replace(spec, index=replace(indexer, relu=relu)),
                index=IndexQueries(meta(5, 64, 128, dtype=dtype), meta(5, 64, dtype=dtype)),
            )
            yield f"chosen512_g16{'-fp8' if kept is FP8 else ''}-{kind}{'-large' if shared_kib == LARGE_KIB else ''}"


# ---------------------------------------------------------------------- recurrent states


def scans() -> Iterator[str]:
    """Mamba-2 and delta nets: usual layers, odd ones, the largest; 4 taps and 3; with captures and without."""
    mamba = {"num_heads": 24, "num_groups": 2}
    layers: dict[str, RecurrentSpec] = {
        f"{head_dim}x{state_dim}": SsmSpec(**mamba, head_dim=head_dim, state_dim=state_dim, conv_width=4)
        for head_dim, state_dim in ((64, 128), (80, 96), (128, 256))
    }
    for heads, groups, head_dim, state_dim in ((32, 16, 128, 128), (6, 2, 80, 96), (8, 8, 64, 64)):
        layers[f"delta{head_dim}x{state_dim}"] = DeltaSpec(
            num_heads=heads, num_groups=groups, head_dim=head_dim, state_dim=state_dim, conv_width=4
        )
    kinds = ((FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32))
    for name, spec in layers.items():
        for dtype, ssm in (*kinds, (FP16, FP16)) if name == "64x128" else kinds:
            scan(spec, dtype, dtype, ssm, has_bias=True)
            yield f"{name}-{DTYPES[dtype]}-{DTYPES[ssm]}"
    spec = layers["64x128"]
    for dtype, conv in ((FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)):
        for width in (4, 3):
            for has_bias in (True, False):
                scan(replace(spec, conv_width=width), dtype, conv, FP32, has_bias=has_bias)
                yield f"{DTYPES[dtype]}-{DTYPES[conv]}-w{width}-{has_bias}"


def scan(spec: RecurrentSpec, dtype: torch.dtype, conv: torch.dtype, ssm: torch.dtype, *, has_bias: bool) -> None:
    """A step with a slice of more than a segment, with and without a capture."""
    width, heads, channels = spec.conv_width, spec.num_heads, spec.num_channels
    states = LayerStates(meta(4, channels, width, dtype=conv), meta(4, heads, spec.head_dim, spec.state_dim, dtype=ssm))
    weights = SsmWeights(
        conv_CW=meta(channels, width),
        conv_bias_C=meta(channels) if has_bias else None,
        decay_H=meta(heads),
        skip_H=None if spec.is_delta else meta(spec.inner_width if spec.head_dim == 80 else heads),
        dt_bias_H=meta(heads),
    )
    for captures in ((), [(1, 100, 3)]):
        backend, step = TritonScan(), step_for((1, 5), (300, 300), captures=captures)
        backend.plan(step)
        backend.run(meta(301, channels, dtype=dtype), meta(301, spec.num_steps, dtype=dtype), states, weights, spec)


# ---------------------------------------------------------------------- experts, adapters, draws


def routers() -> Iterator[str]:
    """Routers as models have them, and the list of another's choice."""
    grouped = RoutingRules(8, "sigmoid", num_groups=8, group_topk=4, scaling_factor=2.5)
    rules = {
        "128-8-softmax": (RoutingRules(8, "softmax"), 128, False),
        "60-4-presoftmax": (RoutingRules(4, "softmax", pre_softmax=True), 60, False),
        "256-8-groups": (grouped, 256, True),
        "256-8-unrounded": (grouped._replace(rounds_scores=False), 256, True),
        "160-6-groups": (RoutingRules(6, "softmax", pre_softmax=True, num_groups=8, group_topk=3), 160, False),
        "16-1-sigmoid": (RoutingRules(1, "sigmoid"), 16, False),
        "512-10-softmax": (RoutingRules(10, "softmax"), 512, False),
    }
    for dtype, kind in routing.DTYPES.items():
        for name, (rule, num_experts, has_bias) in rules.items():
            routing.choose(meta(8, num_experts, dtype=dtype), meta(num_experts) if has_bias else None, rule)
            yield f"{name}-{kind}"
        routing.listed(meta(8, 60, dtype=torch.bool), meta(8, 60, dtype=dtype), 6)
        yield kind


def experts() -> Iterator[str]:
    """The sort, the products and the sum for each height of tiles; fc1 with a bias, fc2 without, and the reverse with
    weights that begin anywhere."""
    num_experts, top_k, width, inner = 128, 8, 4096, 1024
    for dtype, kind in DTYPES.items():
        one, other = meta(2 * inner, width, dtype=dtype), meta(width, inner, dtype=dtype)
        odd = meta(1 + other.numel(), dtype=dtype)[1:].view_as(other)
        first, second = meta(2 * inner, dtype=dtype), meta(width, dtype=dtype)
        for parts, sizes in (((one, first, other, None), (16, 512, 1024, 2048)), ((one, None, odd, second), (16,))):
            weights = ExpertWeights(
                fc1=[{"weight": parts[0], "bias": parts[1]}] * num_experts,
                fc2=[{"weight": parts[2], "bias": parts[3]}] * num_experts,
                first=0,
                top_k=top_k,
                activation=None,
            )
            for num_tokens in sizes:
                for out_TD in (None, meta(num_tokens, width, dtype=dtype)):
                    numbers = meta(2 * num_tokens * top_k + 64 * num_experts, dtype=INT32)
                    choice = ExpertChoice(numbers, num_tokens, top_k, 64, num_experts)
                    TritonExperts().add(meta(num_tokens, width, dtype=dtype), choice, weights, out_TD)
                    yield f"{num_tokens}-{'adds' if out_TD is not None else 'writes'}-{kind}"


def adapters() -> Iterator[str]:
    """Both tiles; few and many parts."""
    backend = TritonLoRA()
    backend.plan(meta(8, dtype=INT32))
    for dtype, kind in DTYPES.items():
        for rank in (16, 32):
            for width in (1024, 4096):
                weights = backend.pairs(4, rank, width, 4096, dtype=dtype, device=META)
                backend.run(meta(8, 4096, dtype=dtype), meta(8, width, dtype=dtype), weights)
                yield f"{width}-{kind}-{rank}"


def draws() -> Iterator[str]:
    """A vocabulary of 131,072 for each dtype; a small and a larger one once."""
    backend, each, rows = TritonSampling(), meta(8, dtype=INT32), meta(8, dtype=INT64)
    for vocab, dtypes in ((131_072, DTYPES), (4096, {FP32: "fp32"}), (262_144, {FP32: "fp32"})):
        for dtype, kind in dtypes.items():
            logits = meta(8, vocab, dtype=dtype)
            columns, pool = meta(len(Column), 16, dtype=INT64), meta(16, 64, dtype=INT32)
            backend.static_draw(logits, columns, each, each, pool, DrawRoom.make(8, META))
            yield f"static-{kind}-{vocab}"
            backend.score(logits, rows, 4, (rows, meta(8)))
            yield f"known-{kind}-{vocab}"
            if vocab == 131_072:
                backend.argmax(logits)
                backend.draw(logits, meta(5, 8, dtype=torch.float64))
                backend.score(logits, rows, 4)
                yield f"eager-{kind}"
    for some in (None, rows):
        backend.forbid(meta(8, 4096), meta(8, 128, dtype=INT32), some)
        yield "all" if some is None else "some"


CASES: tuple[tuple[int, Callable[[], Iterator[str]]], ...] = (
    *((0, case) for case in (norms, activations, gathers, scans, routers, experts, adapters, draws)),
    *((0, partial(case, SMALL_KIB)) for case in (attention, sparse_attention)),
    *((LARGE_SHARED_KIB << 10, partial(case, LARGE_KIB)) for case in (attention, sparse_attention)),
)
"""(least bytes of shared memory that a device has which launches this, unless an earlier case does; the case)."""
