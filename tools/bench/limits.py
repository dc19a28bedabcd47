"""What this machine can do at most, and how near the linears of one SmolLM2-135M step come to it.

    python tools/bench/limits.py [--threads 2] [--rounds 15] [--dtype bfloat16] [--tokens 1,16,32,512] [--json out.json]

Read bandwidth is measured by summing a buffer larger than the caches, arithmetic by square matrix products. A step's
linears must read every weight once and do 2 operations per weight and token: the larger of the two times is the limit.
`prepacked` is oneDNN, `native` our panels, which is what an engine runs. Variants run in turn, so a busy machine slows
all of them; best, median and worst of the rounds are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels import native_build
from megatron_infer.kernels.cpu_native import NativeOps, native_checksum, panel_layout
from megatron_infer.kernels.cpu_torch import TorchOps
from megatron_infer.kernels.packing import PackedLinears, unavailable

LAYERS, HIDDEN, QKV, FFN, VOCAB = 30, 576, 960, 1536, 49152
READ_BYTES = 512 << 20
GEMM_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds over the rounds."""

    best: float
    median: float
    worst: float

    def text(self, unit: float = 1e3) -> str:
        return f"{self.best * unit:8.2f} {self.median * unit:8.2f} {self.worst * unit:8.2f}"


def interleaved(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time every case once a round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            if round_number:
                times[name].append(time.perf_counter() - began)
    return {name: Timing(min(t), statistics.median(t), max(t)) for name, t in times.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of the machine with the present number of threads."""

    read_gbs: float
    gemm_gflops: dict[str, float]

    def seconds(self, *, num_bytes: float, flops: float, dtype: torch.dtype) -> float:
        """The least time that reads `num_bytes` and does `flops`."""
        return max(num_bytes / self.read_gbs, flops / self.gemm_gflops[str(dtype)]) / 1e9


def measure_limits(rounds: int) -> Limits:
    """Best read bandwidth of two ways to read, and the best GEMM rate of each dtype (packed weights where possible)."""
    buffer = torch.ones(READ_BYTES // 4)
    reads: dict[str, Callable[[], object]] = {"torch.sum": buffer.sum}
    try:
        library = native_build.load()
        reads["native checksum"] = lambda: native_checksum(library, buffer)
    except native_build.NativeUnavailable as error:
        print(f"no native reader: {error}")
    best = min(timing.best for timing in interleaved(reads, rounds).values())
    gflops = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype), torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        packed = PackedLinears(reason=unavailable(dtype))
        packed.pack([weight])
        ops = TorchOps(packed)
        cases = {"plain": lambda x=x, w=weight: F.linear(x, w), "packed": lambda x=x, w=weight, o=ops: o.linear(x, w)}
        seconds = min(timing.best for timing in interleaved(cases, max(3, rounds // 3)).values())
        gflops[str(dtype)] = 2 * GEMM_SIZE**3 / seconds / 1e9
    return Limits(READ_BYTES / best / 1e9, gflops)


def step_weights(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The four linears of every layer, and the output head; all distinct, so that no cache holds them."""
    shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    layers = [torch.randn(shape).to(dtype) for _ in range(LAYERS) for shape in shapes]
    return layers, torch.randn(VOCAB, HIDDEN).to(dtype)


def run_linears(ops: TorchOps, layers: list[Tensor], head: Tensor, inputs: dict[int, Tensor], sampled: Tensor) -> None:
    for weight in layers:
        ops.linear(inputs[weight.shape[1]], weight)
    ops.linear(sampled, head)


def bench_linears(limits: Limits, dtype: torch.dtype, tokens: list[int], rounds: int) -> list[dict[str, object]]:
    layers, head = step_weights(dtype)
    packed = PackedLinears(reason=unavailable(dtype))
    packed.pack([*layers, head])
    variants = {"plain": TorchOps(), "prepacked": TorchOps(packed)}
    with contextlib.suppress(native_build.NativeUnavailable):
        library = native_build.load()
        panels = PackedLinears(layout=panel_layout(library, dtype))
        panels.pack([*layers, head])
        variants["native"] = NativeOps(library, dtype, panels)
    layer_elements = sum(weight.numel() for weight in layers)
    num_bytes = (layer_elements + head.numel()) * dtype.itemsize
    print(f"\nlinears of one step, {dtype}, {num_bytes / 1e6:.0f} MB; ms: best, median, worst; share of the limit")
    rows: list[dict[str, object]] = []
    for count in tokens:
        inputs = {width: torch.randn(count, width).to(dtype) for width in (HIDDEN, FFN)}
        sampled = torch.randn(min(count, 32), HIDDEN).to(dtype)  # a prompt draws one token, not one a position
        cases = {
            name: lambda ops=ops, i=inputs, s=sampled: run_linears(ops, layers, head, i, s)
            for name, ops in variants.items()
        }
        flops = 2.0 * (layer_elements * count + head.numel() * sampled.shape[0])
        least = limits.seconds(num_bytes=num_bytes, flops=flops, dtype=dtype)
        for name, timing in interleaved(cases, rounds if count <= 64 else max(3, rounds // 3)).items():
            share = least / timing.best
            print(f"  M={count:<4} {name:<10} {timing.text()}   {share:4.0%} of {least * 1e3:.1f} ms")
            rows.append({"tokens": count, "variant": name, "limit_s": least, "share": share, **asdict(timing)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", default="1,16,32,512")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    with torch.inference_mode():
        limits = measure_limits(args.rounds)
        rates = ", ".join(f"{name.removeprefix('torch.')} {rate:.0f}" for name, rate in limits.gemm_gflops.items())
        print(f"read {limits.read_gbs:.1f} GB/s; GEMM GFLOP/s: {rates}")
        counts = [int(count) for count in args.tokens.split(",")]
        rows = bench_linears(limits, getattr(torch, args.dtype), counts, args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps({"limits": asdict(limits), "linears": rows}))


if __name__ == "__main__":
    main()
