"""Microseconds of each kernel per layer, on every backend, with its share of the machine's limit.

    python tools/bench/kernels.py [--threads 2] [--rounds 15] [--dtype bfloat16] [--layers 12] [--json out.json]

Shapes are SmolLM2-135M's: 9 query heads on 3 kv heads of 64, hidden 576, ffn 1536, vocabulary 49,152. Every layer has
its own cache, so that keys and values come from memory as they do in a step. Backends run in turn within a round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from limits import FFN, HIDDEN, VOCAB, Limits, interleaved, measure_limits

from megatron_infer.kernels import native_build
from megatron_infer.kernels.base import AttendSpec, AttentionBackend, Ops, StepMetadata, lowest_argmax
from megatron_infer.kernels.cpu_native import NativeOps, NativePagedAttention
from megatron_infer.kernels.cpu_torch import TorchOps, TorchPagedAttention
from megatron_infer.kernels.native_sampling import NativeSampling

KV, GROUP, HEAD, BLOCK = 3, 3, 64, 16
SPEC = AttendSpec(num_kv_heads=KV, group_size=GROUP, head_dim=HEAD, scale=HEAD**-0.5, rotary_dim=HEAD)
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode 1 x 256": [(1, 256)],
    "decode 1 x 2048": [(1, 2048)],
    "decode 16 x 256": [(1, 256)] * 16,
    "decode 32 x 256": [(1, 256)] * 32,
    "decode 32 x 1024": [(1, 1024)] * 32,
    "prompt 512": [(512, 512)],
    "prompt 1024": [(1024, 1024)],
    "chunk 256 of 2048": [(256, 2048)],
    "prompts 8 x 64": [(64, 64)] * 8,
    "16 x 256 + prompt 128": [(1, 256)] * 16 + [(128, 128)],
}


def make_step(rows: list[tuple[int, int]], dtype: torch.dtype) -> tuple[StepMetadata, int]:
    """A step of (q_len, kv_len) rows whose blocks are scattered -> (step, blocks of the cache)."""
    counts = [-(-kv_len // BLOCK) for _, kv_len in rows]
    num_blocks = sum(counts) + 1
    ids = torch.randperm(num_blocks - 1, dtype=torch.int32).split(counts)
    table = torch.full((len(rows) + 1, max(counts)), num_blocks - 1, dtype=torch.int32)
    positions, kv_pos = [], []
    for row, (q_len, kv_len) in enumerate(rows):
        table[row, : counts[row]] = ids[row]
        position = torch.arange(kv_len - q_len, kv_len)
        positions.append(position)
        kv_pos.append(ids[row].long()[position // BLOCK] * BLOCK + position % BLOCK)
    q_len, kv_len = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    table_row, num_decode = np.arange(len(rows), dtype=np.int32), sum(n == 1 for n, _ in rows)
    angle = torch.rand(int(cu_q[-1]), HEAD)
    meta = StepMetadata(
        num_tokens=int(cu_q[-1]),
        num_rows=len(rows),
        num_decode=num_decode,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=np.where(np.arange(len(rows)) < num_decode, 0, q_len).astype(np.int32),
        q_len_R=torch.from_numpy(q_len),
        kv_len_R=torch.from_numpy(kv_len),
        cu_q_R1=torch.from_numpy(cu_q),
        table_row_R=torch.from_numpy(table_row),
        block_table=table,
        positions_T=torch.cat(positions),
        kv_pos_T=torch.cat(kv_pos),
        cos_TR=angle.cos().to(dtype),
        sin_TR=angle.sin().to(dtype),
    )
    return meta, num_blocks


def attention_cases(
    backends: dict[str, AttentionBackend], rows: list[tuple[int, int]], dtype: torch.dtype, layers: int
) -> dict[str, Callable[[], object]]:
    meta, num_blocks = make_step(rows, dtype)
    cache = torch.randn(layers, 2, num_blocks, BLOCK, KV, HEAD).to(dtype)
    fused = torch.randn(meta.num_tokens, KV, GROUP + 2, HEAD).to(dtype)
    q, k, v = fused[:, :, :GROUP], fused[:, :, -2], fused[:, :, -1]

    def run(backend: AttentionBackend) -> None:
        backend.plan(meta)
        for layer in range(layers):
            backend.run(q, k, v, cache, layer=layer, spec=SPEC)

    return {name: lambda backend=backend: run(backend) for name, backend in backends.items()}


def attention_work(rows: list[tuple[int, int]], dtype: torch.dtype) -> tuple[int, int]:
    """(bytes, flops) one layer needs at least: every key and value once, two products for every visible pair."""
    num_bytes = sum(kv_len for _, kv_len in rows) * 2 * KV * HEAD * dtype.itemsize
    pairs = sum(q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2 for q_len, kv_len in rows)
    return num_bytes, 4 * HEAD * KV * GROUP * pairs


def elementwise_cases(ops: Ops, dtype: torch.dtype, tokens: int, repeat: int) -> dict[str, Callable[[], object]]:
    x, residual, weight = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.randn(HIDDEN)
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    gate_up, logits = torch.randn(tokens, 2 * FFN).to(dtype), torch.randn(tokens, VOCAB)
    argmax = NativeSampling(native_build.load()).argmax if isinstance(ops, NativeOps) else lowest_argmax
    calls: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight, 1e-5),
        "silu_mul": lambda: ops.silu_mul(gate_up),
        "argmax": lambda: argmax(logits),
    }
    return {name: lambda call=call: [call() for _ in range(repeat)] for name, call in calls.items()}


def bench_attention(
    backends: dict[str, AttentionBackend], limits: Limits, dtype: torch.dtype, layers: int, rounds: int
) -> list[dict[str, object]]:
    print(f"\nattention, us a layer: best, median, worst over rounds ({dtype})")
    rows: list[dict[str, object]] = []
    for name, step in STEPS.items():
        num_bytes, flops = attention_work(step, dtype)
        least = limits.seconds(num_bytes=num_bytes, flops=flops, dtype=dtype)
        few = rounds if max(q for q, _ in step) == 1 else max(3, rounds // 3)
        for backend, timing in interleaved(attention_cases(backends, step, dtype, layers), few).items():
            best = timing.best / layers
            rate = f"{num_bytes / best / 1e9:5.1f} GB/s {flops / best / 1e9:6.1f} GFLOP/s"
            print(f"  {name:<22} {backend:<7} {timing.text(1e6 / layers)}   {rate} {least / best:4.0%} of the limit")
            rows.append({"case": name, "backend": backend, "layers": layers, "limit_s": least, **asdict(timing)})
    return rows


def bench_elementwise(all_ops: dict[str, Ops], dtype: torch.dtype, rounds: int) -> list[dict[str, object]]:
    repeat = 30
    print("\nelementwise, us a call: best, median, worst over rounds")
    rows: list[dict[str, object]] = []
    for tokens in (1, 32, 512):
        for name in ("add_rms_norm", "silu_mul", "argmax"):
            cases = {which: elementwise_cases(ops, dtype, tokens, repeat)[name] for which, ops in all_ops.items()}
            for which, timing in interleaved(cases, max(3, rounds // 3)).items():
                print(f"  {name:<13} T={tokens:<4} {which:<7} {timing.text(1e6 / repeat)}")
                rows.append({"case": name, "tokens": tokens, "backend": which, "calls": repeat, **asdict(timing)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    backends: dict[str, AttentionBackend] = {"torch": TorchPagedAttention()}
    all_ops: dict[str, Ops] = {"torch": TorchOps()}
    try:
        library = native_build.load()
        backends["native"] = NativePagedAttention(library, dtype)
        all_ops["native"] = NativeOps(library, dtype)
    except native_build.NativeUnavailable as error:
        print(f"no native kernels: {error}")
    with torch.inference_mode():
        limits = measure_limits(args.rounds)
        print(f"read {limits.read_gbs:.1f} GB/s; GEMM {limits.gemm_gflops[str(dtype)]:.0f} GFLOP/s")
        attention = bench_attention(backends, limits, dtype, args.layers, args.rounds)
        elementwise = bench_elementwise(all_ops, dtype, args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps({"limits": asdict(limits), "attention": attention, "elementwise": elementwise}))


if __name__ == "__main__":
    main()
