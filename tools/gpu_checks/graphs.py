"""Captured steps against the same steps run as they are, bit for bit; and what becomes of graphs when things change.

In a rehearsal the engine's stand-in repeats recorded launches, as a graph would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lora_cases import random_adapter
from replay_recorder import REPLAY
from static_kernels import STATIC

from gpu_checks.context import Context
from gpu_checks.engines import Work, answers, environment, make_engine, make_model, tokens_of, workload
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.native.native_build import BACKEND_VARIABLE
from megatron_infer.kernels.triton.launch import PDL_CAPABILITY, PDL_VARIABLE
from megatron_infer.memory.device import Device
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE, SPARE_BYTES, Recorded, Recorder, make_recorder
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect

SLACK = 48 << 20
"""Bytes that the allocator rounds up to, and that workspaces and kernels loaded meanwhile take."""


LEFT_TO_THE_DEVICE = {
    "num_cuda_graphs": None,
    "cuda_graph_capture": "auto",
    "overlap": None,
    "use_cuda_graphs_for_non_decode_steps": False,
}


def graphed(ctx: Context, model: Any, *, captures: bool = True, kernels: str | None = STATIC, **options: Any) -> Any:
    """An engine whose steps are captured, those that prefill too; captures=False: only padded. kernels: the backend in
    a rehearsal."""
    rehearsal = {"num_cuda_graphs": 6, "max_requests": 4, "max_tokens": 32, "cuda_graph_mixed_prefill_count": 2}
    settings = ctx.pick({"num_cuda_graphs": -1}, rehearsal)
    settings |= {"use_cuda_graphs_for_non_decode_steps": True} | options
    with (
        environment(GRAPHS_VARIABLE, ctx.pick(None, REPLAY) if captures else EAGER),
        environment(BACKEND_VARIABLE, ctx.pick(None, kernels)),
    ):
        engine = make_engine(model, ctx.device, **settings)
    if inspect(engine).runner.graphs is None:
        rows = {row.operation: row.reasons for row in engine.kernels.rows}
        why = f"no graphs: {rows.get('CUDA graphs')}"
        if ctx.rehearse:
            raise Unavailable(why)
        raise AssertionError(why)
    return engine


def _kinds(ctx: Context) -> tuple[str, ...]:
    return ctx.pick(("attention", "windows", "experts", "hybrid", "mamba"), ("attention", "hybrid"))


def same(compare: Comparison, label: str, got: list[Any], wanted: list[Any]) -> None:
    """Tokens and the bits of their log probabilities."""
    compare.require(f"{label}: other tokens", tokens_of(got) == tokens_of(wanted))
    for mine, reference in zip(got, wanted, strict=True):
        for one, other in zip(mine.outputs, reference.outputs, strict=True):
            compare.require(f"{label}: other log probabilities", one.cumulative_logprob == other.cumulative_logprob)


def hold_replayed(ctx: Context, compare: Comparison, label: str, model: Any, work: Work, **options: Any) -> Any:
    """Bits of replayed steps against those of the same padded steps run as they are -> the engine that replayed.

    options: of `graphed`.
    """
    engine = graphed(ctx, model, **options)
    padded = graphed(ctx, model, captures=False, **options)
    same(compare, label, answers(engine, work), answers(padded, work))
    pool = inspect(engine).runner.graphs.pool
    compare.require(f"{label}: no step was replayed", pool.counts.replays > 0)
    compare.require(f"{label}: refused {pool.refused}", not pool.refused)
    return engine


@check(budget_s=60)
def graphs_on_off(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Greedy and seeded tokens and their log probabilities have the same bits with graphs and without (padded)."""
    counts = {}
    drawing = ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 40}, {"temperature": 0.0, "logprobs": 1})
    for kind in _kinds(ctx):
        kernels = "triton" if kind == "attention" else STATIC
        for dtype in ctx.pick((torch.float32, torch.bfloat16), (torch.float32,)):
            model = make_model(kind, dtype, ctx.device)
            for params in ctx.pick(drawing, drawing[:1]):
                label = f"{kind} {dtype} {params}"
                engine = hold_replayed(ctx, compare, label, model, workload(ctx, **params), kernels=kernels)
                pool = inspect(engine).runner.graphs.pool
                counts[kind] = {"captured": len(pool.captured), "replays": pool.counts.replays}
                counts[kind]["eager"] = dict(pool.counts.eager)
    return {"counts": counts}


@check(budget_s=30)
def pdl_on_off(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Launches that begin while the one before ends (MEGATRON_INFER_PDL=1) change no bit; both times are told."""
    capability = ctx.cuda.get_device_capability()
    if not ctx.rehearse and capability < PDL_CAPABILITY:
        raise Unavailable(f"needs compute capability {PDL_CAPABILITY}, this is {capability}")
    times = {}
    dtype = ctx.pick(torch.bfloat16, torch.float32)
    model, work = make_model("attention", dtype, ctx.device), workload(ctx)
    for captures in ctx.pick((True, False), (False,)):
        how = "replayed" if captures else "eager"
        found = []
        for variable in (None, "1"):
            with environment(PDL_VARIABLE, variable):
                engine = graphed(ctx, model, captures=captures)
                if not ctx.rehearse:
                    answers(engine, work)  # compiles and captures
                ctx.wait()
                started = time.perf_counter()
                found.append(answers(engine, work))
                ctx.wait()
                launches = "plain" if variable is None else "overlapping"
                times[f"{how}, {launches}"] = round((time.perf_counter() - started) * 1e3, 3)
        same(compare, how, found[1], found[0])
    return {"milliseconds": times}


@check(budget_s=20)
def graphs_new_weights(ctx: Context, compare: Comparison) -> None:
    """A replay after weights changed in place computes with the new ones, without another capture."""
    model, work = make_model("attention", torch.float32, ctx.device), workload(ctx)
    engine = graphed(ctx, model)
    before = tokens_of(answers(engine, work))
    captures = inspect(engine).runner.graphs.pool.counts.captures
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    after = tokens_of(answers(engine, work))
    fresh = tokens_of(answers(graphed(ctx, model), work))
    compare.require("tokens are those of the old weights", before != after)
    compare.require("tokens are not those of the new weights", after == fresh)
    again = inspect(engine).runner.graphs.pool.counts.captures - captures
    # A CPU's packed copies of the weights are made anew, elsewhere.
    moved = bool(engine.kernels.packed.num_bytes)
    compare.require(f"{again} graphs captured again", again == 0 or moved)


@check(budget_s=60, alone=True)
def graphs_at_start(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """An engine that is told nothing overlaps, has a graph of each shape before its first request within the
    estimate, answers as one without either, and captures nothing in traffic.
    """
    model = make_model("attention", ctx.pick(torch.bfloat16, torch.float32), ctx.device)
    rehearsal = {"num_cuda_graphs": 6, "cuda_graph_capture": "start", "overlap": True}
    free = ctx.free_bytes()
    engine = graphed(ctx, model, **ctx.pick(LEFT_TO_THE_DEVICE, rehearsal))
    pool, taken = inspect(engine).runner.graphs.pool, free - ctx.free_bytes()
    captured = pool.counts.captures
    compare.require(f"captured {pool.captured}, refused {pool.refused}", captured == len(pool.index))
    compare.require("steps do not overlap", bool(engine.config.overlap))
    most = engine.sizes.kv_bytes + engine.sizes.graph_bytes + 8 * SLACK
    compare.require(f"{taken:,} bytes taken, {most:,} expected", ctx.rehearse or taken <= most)
    work = workload(ctx)
    same(compare, "at start", answers(engine, work), answers(graphed(ctx, model, captures=False), work))
    compare.require("a step was captured in traffic", pool.counts.captures == captured)
    figures = {"captured": captured, "seconds": pool.counts.capture_s, "bytes": pool.num_bytes, "taken_bytes": taken}
    compare.figure = f"{captured} graphs in {pool.counts.capture_s:.2f} s, {pool.num_bytes / 2**20:.1f} MiB"
    return figures


@check(budget_s=40)
def graphs_suspend(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Graphs outlive suspend exactly when the cache keeps its addresses, and tokens are the same either way."""
    drops = {}
    model = make_model("attention", torch.float32, ctx.device)
    ways: dict[str, dict[str, Any]] = {
        "persist": {},
        "offload": {},
        "recompute": {},
        "offload, static pointers": {"static_kv_memory_pointers": True},
        "recompute, static pointers": {"static_kv_memory_pointers": True},
    }
    work = workload(ctx, count=ctx.pick(8, 2))
    wanted = tokens_of(answers(graphed(ctx, model), work))
    for name, options in ways.items():
        engine = graphed(ctx, model, **options)
        ids = [engine.add_request(prompt, params, stream="final") for prompt, params in work]
        done: dict[str, Any] = {}
        for number in range(10_000):
            if not engine.has_unfinished():
                break
            if number in (3, 6):
                engine.suspend(name.split(",")[0], {"kv_cache"})
                engine.resume()
            done |= {output.request_id: output for output in engine.step() if output.finished}
        compare.require(f"{name}: other tokens", tokens_of([done[one] for one in ids]) == wanted)
        drops[name] = dict(inspect(engine).runner.graphs.pool.counts.invalidated)
        if name == "persist" or "static" in name:
            compare.require(f"{name}: graphs were dropped ({drops[name]})", not drops[name])
    return {"dropped": drops}


@check(budget_s=40, long=True)
def graphs_many_requests(ctx: Context, compare: Comparison) -> None:
    """Requests that come and go over shapes of every size keep their tokens under replay."""
    model = make_model("hybrid" if not ctx.rehearse else "attention", torch.float32, ctx.device)
    options = {"max_requests": ctx.pick(64, 4), "buffer_size_gb": ctx.pick(0.3, 0.06)}
    work = workload(ctx, count=ctx.pick(96, 3), temperature=0.8, top_p=0.95)
    work += [([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False))]
    hold_replayed(ctx, compare, "many", model, work, **options)


@check(budget_s=15, alone=True)
def graphs_failed_capture(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """A capture that fails leaves random generators, allocator and free memory as they were; the next succeeds."""
    with environment(GRAPHS_VARIABLE, ctx.pick(None, REPLAY)):
        recorder = make_recorder(Device(str(ctx.device)))
    assert not isinstance(recorder, str), recorder
    cells = torch.zeros(4, device=ctx.device)

    def fails() -> None:
        scratch = torch.empty(ctx.pick(64 << 20, 64), dtype=torch.uint8, device=ctx.device)
        scratch.zero_()
        cells.add_(1)
        cells.sum().item()  # not while a stream is captured

    def draws() -> list[float]:
        torch.manual_seed(7)
        return [torch.rand((), device=ctx.device).item() for _ in range(3)]

    def works() -> None:
        cells.add_(1)

    with torch.inference_mode():
        wanted = draws()
        for run in (works, fails):  # workspaces, and torch's own memory for a first capture
            _attempt(recorder, run)
        recorder.reset()
        free = ctx.free_bytes()
        for _ in range(3):
            compare.require("a capture that reads a value succeeded", _attempt(recorder, fails) is None)
        compare.require("other draws after a capture that failed", draws() == wanted)
        recorder.reset()
        left = free - ctx.free_bytes()
        compare.require(f"{left:,} bytes are not back", ctx.rehearse or left <= 4 << 20)
        graph = _attempt(recorder, works)
        cells.zero_()
        if graph is not None:
            graph.replay()
        ctx.wait()
        compare.require("the next capture does not compute", cells.tolist() == [1.0] * 4)
    return {"left_over_bytes": left}


def _attempt(recorder: Recorder, run: Callable[[], None]) -> Recorded | None:
    """The capture; None: it raised."""
    try:
        recorder.warm_up(run)
        return recorder.capture(run)
    except RuntimeError:
        return None


@check(budget_s=20, alone=True)
def graphs_reserve(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """A shape whose memory is just there is captured: what was reserved for it is not taken by what outlives it."""
    model = make_model("attention", ctx.pick(torch.bfloat16, torch.float32), ctx.device)
    options = {"max_sequence_length": 4096, "max_tokens": 4096, "buffer_size_gb": 0.3}
    pool = inspect(graphed(ctx, model, **ctx.pick(options, {}))).runner.graphs.pool
    shape = max(pool.index.shapes, key=lambda one: one.num_tokens)
    free, needed = ctx.free_bytes(), pool.needed_bytes(shape)
    ballast = torch.empty(ctx.pick(max(1, free - needed - SLACK), 1), dtype=torch.uint8, device=ctx.device)
    with torch.inference_mode():
        pool.ready(shape)
    del ballast
    compare.require(f"refused: {pool.refused}", not pool.refused)
    taken = free - ctx.free_bytes()
    most = needed - SPARE_BYTES + SLACK
    compare.require(f"{taken:,} bytes were taken, {most:,} estimated", ctx.rehearse or taken <= most)
    return {"needed_bytes": needed, "taken_bytes": taken}


@check(budget_s=60)
def adapters_captured(ctx: Context, compare: Comparison) -> None:
    """Tokens and log probabilities of requests of several adapters and none have the same bits with graphs and without
    (padded), also of adapters that are loaded or replaced after the capture.
    """
    for kind in ctx.pick(("attention", "hybrid"), ("attention",)):
        for dtype in ctx.pick((torch.float32, torch.bfloat16), (torch.float32,)):
            model = make_model(kind, dtype, ctx.device)
            lora = LoRAConfig(max_loras=2, max_rank=20)
            engines = [graphed(ctx, model, lora=lora, captures=captures) for captures in (True, False)]
            work = workload(ctx, count=ctx.pick(12, 3))  # of the first adapter, the base model, the second
            seen: list[Any] = []
            for first in (3, 7):
                for engine in engines:
                    for name, rank in (("first", first), ("second", 20)):
                        adapter = random_adapter(model, name, rank=rank, seed=rank, scale=0.5)
                        engine.load_adapter(name, adapter, replace=name == "first")
                names = ("first", None, "second")
                asked = [(prompt, replace(how, adapter=names[i % 3])) for i, (prompt, how) in enumerate(work)]
                got, wanted = (answers(engine, asked) for engine in engines)
                same(compare, f"{kind} {dtype} rank {first}", got, wanted)
                seen.append(tokens_of(got))
            compare.require(f"{kind} {dtype}: the adapter that replaced another one draws as it", seen[0] != seen[1])
            pool = inspect(engines[0]).runner.graphs.pool
            compare.require(f"{kind} {dtype}: refused {pool.refused}", not pool.refused)
            with_adapters = any(shape.has_adapters for shape in pool.captured)
            compare.require(f"{kind} {dtype}: steps with adapters were not replayed", with_adapters)
