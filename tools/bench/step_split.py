"""What a step spends its time on, by part: linears, attention, scan, norms, Python, sampling and the rest.

    python tools/bench/step_split.py [--shape smollm2 --shape moe] [--rows 1 16 64] [--chunk 512] [--json out.json]

Shapes: smollm2 (its real weights), and with random weights llama-1b-4 (4 of the 16 layers of Llama-3.2-1B, its whole
vocabulary), moe, hybrid (see light/shapes.py). Every native function is timed by itself, and a call that runs many
layers times its operations ("experts": routers and shared experts too); "python" is all else within a forward:
dispatch, allocation, and what torch computes. "sampling" is all between logits and tokens, "rest" is scheduling, commit
and outputs; of a chunk alone also the check of all weights by an engine that was idle. Medians of the steps in ms.
--chunk: a step of 16 rows and so many tokens of a prompt, and the two apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tools" / "bench"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import ctypes
import gc
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from light.engine import Bench, pool_gib
from light.shapes import PLANS, random_model

from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.step_work import StepCounter
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import step_counter
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.inspect import inspect

SHAPES = ("smollm2", "llama-1b-4", "moe", "hybrid")
PARTS = {
    "linears": ("mi_linear", "mi_panel_linear", "mi_int8_", "mi_int4_", "mi_argmax_linear", "mi_select_rows"),
    "attention": ("mi_attend",),
    "scan": ("mi_ssm", "mi_scan", "mi_conv"),
    "norms": ("mi_rms_norm", "mi_gated_rms_norm", "mi_silu"),
}
"""Prefixes of the native functions of each part; any other native function of a layer is a part by its own name."""
PART_OF_KIND = {
    "norms": "norms",
    "linears": "linears",
    "attention": "attention",
    "activations": "norms",
    "adapters": "linears",
    "experts": "experts",
    "other activations": "norms",
}
"""The part of each kind of operation in a native call that runs many layers."""
PYTHON, SAMPLING, REST = "python", "sampling", "rest"
MIXED_ROWS = 16
STEADY = 4


class PartClock:
    """Seconds of each part of a step. A part's time is its own: what it calls of other parts is theirs."""

    def __init__(self, take_seconds: Callable[[], dict[str, float]] = dict) -> None:
        """take_seconds: of each kind of operation within the native calls that run many layers, since it was last
        called; what else those calls take is Python's."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._take_seconds = take_seconds
        self._open: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its calls counted to `part`; within sampling all counts as sampling."""
        open_parts, seconds, now = self._open, self.seconds, time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            if not open_parts or open_parts[-1] == SAMPLING:
                return function(*args, **kwargs)
            begun = now()
            seconds[open_parts[-1]] += begun - self._since
            self._since = begun
            open_parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                ended = now()
                seconds[open_parts.pop()] += ended - self._since
                self._since = ended

        return call

    def measure(self, step: Callable[[], Any]) -> dict[str, float]:
        """Seconds of each part of one step."""
        self.seconds.clear()
        self._take_seconds()
        self._open[:] = [REST]
        self._since = time.perf_counter()
        step()
        self.seconds[REST] += time.perf_counter() - self._since
        self._open.clear()
        for kind, seconds in self._take_seconds().items():
            self.seconds[PART_OF_KIND[kind]] += seconds
            self.seconds[PYTHON] -= seconds
        return dict(self.seconds)


def part_of(function: str) -> str:
    return next((part for part, starts in PARTS.items() if function.startswith(starts)), function)


def clock_of(engine: DynamicInferenceEngine) -> PartClock:
    """Put a clock around the engine's forward, its draws, and every native function that its kernels hold."""
    runner, kernels = inspect(engine).runner, engine.kernels
    clock = PartClock() if kernels.layers is None else PartClock(kernels.layers.take_seconds)
    runner.forward = clock.timed(PYTHON, runner.forward)
    runner.sample = clock.timed(SAMPLING, runner.sample)
    for holder in (kernels.ops, getattr(kernels.ops, "argmax_linear", None), kernels.attention, kernels.scan):
        for name, value in list(vars(holder).items() if holder is not None else ()):
            if isinstance(value, ctypes._CFuncPtr):
                setattr(holder, name, clock.timed(part_of(value.__name__), value))
    return clock


def load(name: str, dtype: torch.dtype) -> tuple[Any, StepCounter]:
    """A model and what its steps are known to take."""
    device, text = torch.device("cpu"), str(dtype).removeprefix("torch.")
    if name in PLANS:
        return random_model(PLANS[name], dtype, device), step_counter(PLANS[name], dtype=text)
    source = open_source(name)
    return build_model(source, dtype=dtype, device="cpu"), step_counter(source.config(), dtype=text)


def medians(splits: list[dict[str, float]]) -> dict[str, float]:
    """ms of each part, and of the whole."""
    parts = {part: statistics.median(split.get(part, 0.0) for split in splits) * 1e3 for part in set().union(*splits)}
    return parts | {"step": statistics.median(sum(split.values()) for split in splits) * 1e3}


def split_decode(bench: Bench, clock: PartClock, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps with more and more rows, and one with a chunk of a prompt."""
    found, running = [], 0
    new_tokens = (len(args.rows) + 1) * (args.steps + STEADY) + sum(args.rows) + 8  # fills of others take steps, too
    for rows in sorted(args.rows):
        for seed in range(running, rows):
            bench.add(args.context, new_tokens, seed)
        running = rows
        bench.prefill()
        bench.steps(STEADY)
        splits = [clock.measure(bench.engine.step) for _ in range(args.steps)]
        found.append({"what": f"{rows} rows", "rows": rows, **medians(splits)})
        if args.chunk and rows == MIXED_ROWS:
            found.append(split_chunk(bench, clock, args, rows))
    return found


def split_chunk(bench: Bench, clock: PartClock, args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Steps of a whole prompt of args.chunk tokens, and of `rows` rows that decode."""
    splits = []
    for number in range(args.steps // 4 + 2):
        bench.add(args.chunk, 1, 10_000 * (rows + 1) + number)
        splits.append(clock.measure(bench.engine.step))
        bench.engine.step()
    what = f"{rows} rows + {args.chunk}" if rows else f"chunk {args.chunk}"
    return {"what": what, "rows": rows, "chunk": args.chunk, **medians(splits[1:])}


def table(rows: list[dict[str, Any]]) -> str:
    """The parts that any step has, in the order of PARTS."""
    seen = set().union(*rows) - {"what", "rows", "chunk", "shape", "step"}
    order = [*PARTS, *sorted(seen - {*PARTS, PYTHON, SAMPLING, REST}), PYTHON, SAMPLING, REST]
    parts = [part for part in order if part in seen]
    lines = [f"{'ms of a step':<18}{'whole':>9}" + "".join(f"{part:>11}" for part in parts)]
    for row in rows:
        cells = "".join(f"{row.get(part, 0.0):>11.2f}" for part in parts)
        lines.append(f"{row['what']:<18}{row['step']:>9.2f}{cells}")
    return "\n".join(lines)


def measure_shape(name: str, dtype: torch.dtype, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, counter = load(name, dtype)
    most, longest = max(args.rows) + 1, args.context + 2 * sum(args.rows) + 40 * args.steps + args.chunk
    room = pool_gib(counter.shape, max_requests=most, max_tokens=args.context + sum(args.rows) + 8 * args.steps)
    asked = {
        "buffer_size_gb": room,
        "max_requests": most,
        "max_tokens": max(512, most + args.chunk),
        "max_sequence_length": longest,
        "enable_prefix_caching": False,
    }
    config = machine_config(asked, counter.shape, is_cuda=False, available_bytes=2**34)
    engine = DynamicInferenceEngine(model, config, eos_ids=(), device="cpu", owns_weights=True)
    bench, clock = Bench(engine, counter, torch.device("cpu")), clock_of(engine)
    rows = [split_chunk(bench, clock, args, 0)] if args.chunk else []
    rows += split_decode(bench, clock, args)
    print(f"\n{name}, {str(dtype).removeprefix('torch.')}, context {args.context}")
    print(table(rows), flush=True)
    return [{"shape": name, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=[*SHAPES, "tiny-llama", "tiny-hybrid"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256])
    parser.add_argument("--context", type=int, default=192, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=24, help="steps measured for each number of rows")
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {args.threads} threads")
    rows: list[dict[str, Any]] = []
    for name in args.shape or SHAPES:
        rows += measure_shape(name, getattr(torch, args.dtype), args)
        gc.collect()
    if args.json is not None:
        args.json.write_text(
            json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
