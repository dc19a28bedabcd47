"""The pool of keys and values: preemption where it is too small, and suspends of it."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import InferenceConfig, PreemptionMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

# ---------------------------------------------------------------------- preemption

JOB_BLOCK = 16
JOB_VOCAB = 128
"""Vocabulary of the tiny model. The token ids of prompts are below it with every model."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt and how many tokens it draws."""

    prompt: list[int]
    params: SamplingParams

    @property
    def num_blocks(self) -> int:
        """Held at its end; the last token drawn is never stored."""
        assert self.params.max_tokens is not None
        return -(-(len(self.prompt) + self.params.max_tokens - 1) // JOB_BLOCK)


def make_jobs(num_blocks: int, *, max_prompt: int, max_new: int) -> list[Job]:
    """Jobs that hold at least `num_blocks` blocks together at their end."""
    rng = random.Random(11)
    jobs: list[Job] = []
    asked = 0
    while asked < num_blocks:
        prompt = [rng.randrange(4, JOB_VOCAB) for _ in range(rng.randint(max_prompt // 8, max_prompt))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(max_new // 4, max_new), ignore_eos=True)
        jobs.append(Job(prompt, params))
        asked += jobs[-1].num_blocks
    return jobs


def play(
    clock: Clock, model: torch.nn.Module, config: InferenceConfig, jobs: list[Job], whole: list[list[int]]
) -> Done:
    """All jobs at once, on an engine of their own; whole: their tokens where nothing is preempted, or empty."""
    engine, completion = DynamicInferenceEngine(model, config), list[float]()
    with clock:
        started = time.perf_counter()
        outputs = engine.generate(
            [job.prompt for job in jobs],
            [job.params for job in jobs],
            on_output=lambda output: completion.append(time.perf_counter() - started),
        )
    tokens = [output.outputs[0].token_ids for output in outputs]
    counters, cuts = engine.stats().counters, statistics.quantiles(completion, n=10)
    names = ("paused", "evicted", "swapped_out", "swapped_in", "recomputed_tokens")
    if not whole:
        assert not counters["evicted"] and not counters["paused"], "the large pool was too small"
        whole += tokens
    figures = {
        "requests": len(jobs),
        "equal": sum(mine == theirs for mine, theirs in zip(tokens, whole, strict=False)),
        **{name.replace("_", " "): counters[name] for name in names},
        "completed after s: p10": cuts[0],
        "p50": cuts[4],
        "p90": cuts[8],
        "most": max(completion),
    }
    return Done(sum(map(len, tokens)), figures)


@contextlib.contextmanager
def preemption(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.model == "tiny":
        model: torch.nn.Module = tiny_gpt(vocab_size=JOB_VOCAB, max_sequence_length=512, init_method_std=0.2)
    else:  # float32: a token that is computed again equals the one decoded before
        model = build_model(open_source(args.model), dtype=torch.float32)
    base: dict[str, Any] = {
        "block_size_tokens": JOB_BLOCK,
        "max_sequence_length": args.max_prompt + args.max_new,
        "max_requests": args.rows,
        "max_tokens": 512,
        "enable_chunked_prefill": True,
        "overlap": args.overlap,
    }
    gib = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.1, **base)).sizes.block_bytes / GIB

    def jobs_of(demand: float) -> list[Job]:
        return make_jobs(int(demand * args.pool), max_prompt=args.max_prompt, max_new=args.max_new)

    def config_of(mode: PreemptionMode) -> InferenceConfig:
        return InferenceConfig(
            buffer_size_gb=(args.pool + 1) * gib + 1e-9,
            paused_buffer_size_gb=0,
            preemption_mode=mode,
            swap_buffer_size_gb=0 if mode is PreemptionMode.RECOMPUTE else 2 * args.pool * gib + 1e-9,
            **base,
        )

    demands = [float(text) for text in args.demand.split(",")]
    everything = jobs_of(max(demands))
    total = sum(job.num_blocks for job in everything)
    large = InferenceConfig(buffer_size_gb=(total + 1) * gib + 1e-9, **base)
    whole: list[list[int]] = []
    measures = [
        Measure(
            "all in a large pool",
            "token",
            {"large": partial(play, model=model, config=large, jobs=everything, whole=whole)},
        )
    ]
    modes = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, PreemptionMode.AUTO)
    for demand in demands:
        variants: dict[str, Variant] = {
            mode.value: partial(play, model=model, config=config_of(mode), jobs=jobs_of(demand), whole=whole)
            for mode in modes
        }
        measures.append(Measure(f"{demand:g} times a pool of {args.pool} blocks of {JOB_BLOCK}", "token", variants))
    yield measures


# ---------------------------------------------------------------------- suspend

MIB = 2**20
BLOCK = 64


def engine_with(llm: LLM, pool_mib: float, mode: str) -> DynamicInferenceEngine:
    """Another engine on the same weights with its own pool."""
    config = InferenceConfig(
        buffer_size_gb=pool_mib / 1024,
        block_size_tokens=BLOCK,
        max_requests=256,
        max_tokens=1024,
        enable_chunked_prefill=True,
        kv_cache_management_mode=mode,
    )
    return DynamicInferenceEngine(llm.engine.model, config, eos_ids=())


def fill(engine: DynamicInferenceEngine, live_bytes: float) -> int:
    """Bring requests into decode until they hold about `live_bytes` -> bytes they hold."""
    sizes, rng = engine.sizes, random.Random(0)
    blocks = max(1, int(live_bytes // sizes.block_bytes))
    vocabulary = engine.shape.vocab_size
    per_request = min(8, blocks)
    for first in range(0, blocks, per_request):
        tokens = min(per_request, blocks - first) * BLOCK - BLOCK // 2
        prompt = [rng.randrange(vocabulary) for _ in range(tokens)]
        engine.add_request(
            prompt, SamplingParams(max_tokens=BLOCK // 2, temperature=0.0, ignore_eos=True), stream="final"
        )
    while engine.stats().num_waiting or inspect(engine).scheduler.admitted_requests.prefilling:
        engine.step()
    return len(inspect(engine).context.held_blocks()) * sizes.block_bytes


def suspends(clock: Clock, llm: LLM, pool_mib: float, live_mib: float, cycles: int, *, touched: bool = False) -> Done:
    """Suspend, resume and a step, `cycles` times; the step draws a token for every request.

    touched: every page of the pool is in memory before.
    """
    engine = engine_with(llm, pool_mib, "offload")
    held = fill(engine, live_mib * MIB)
    if touched:
        inspect(engine).store.kv_cache.view(-1)[::1024].zero_()
    engine.step()
    plain = Clock()
    with plain:
        engine.step()
    reports, first_ms = [], []
    with clock:
        for _ in range(cycles):
            reports.append((engine.suspend(tags={"kv_cache"}), engine.resume()))
            first = Clock()
            with first:
                engine.step()
            first_ms.append(1e3 * first.seconds)
    engine.suspend("recompute", tags={"kv_cache"})
    copied = reports[0][0].tags["kv_cache"]
    figures = {
        "live MiB": held / MIB,
        "copied MiB": copied.bytes_copied / MIB,
        "freed MiB": copied.bytes_freed / MIB,
        "suspend ms": statistics.median(1e3 * suspended.seconds for suspended, _ in reports),
        "resume ms": statistics.median(1e3 * resumed.seconds for _, resumed in reports),
        "first step ms": statistics.median(first_ms),
        "a step ms": 1e3 * plain.seconds,
    }
    return Done(cycles, figures)


def resident(clock: Clock, llm: LLM, mode: str, cycles: int) -> Done:
    """The process's resident set over many cycles."""
    engine, figures = engine_with(llm, 128, mode), dict[str, float]()
    marks = {1, *range(cycles // 4, cycles + 1, max(1, cycles // 4))}
    with clock:
        for number in range(1, cycles + 1):
            if not engine.has_unfinished():
                fill(engine, 24 * MIB)
            engine.suspend(tags={"kv_cache"})
            engine.resume()
            engine.step()
            if number in marks:
                figures[f"MiB resident after {number}"] = engine.suspend().process_bytes_after / MIB
                engine.resume()
    engine.suspend("recompute", tags={"kv_cache"})
    return Done(cycles, figures)


@contextlib.contextmanager
def suspend(args: argparse.Namespace) -> Iterator[list[Measure]]:
    llm, pool = LLM(args.model), args.pool_mib
    shares: dict[str, Variant] = {
        f"{share:.0%} live": partial(suspends, llm=llm, pool_mib=pool, live_mib=0.98 * share * pool, cycles=args.cycles)
        for share in (0.05, 0.25, 1.0)
    }
    pools: dict[str, Variant] = {
        f"{size} MiB": partial(suspends, llm=llm, pool_mib=size, live_mib=24, cycles=args.cycles, touched=True)
        for size in (128, 512, 2048, 4096)
    }
    modes: dict[str, Variant] = {
        mode: partial(resident, llm=llm, mode=mode, cycles=args.resident_cycles)
        for mode in ("persist", "offload", "recompute")
    }
    yield [
        Measure(f"offload, a pool of {pool:g} MiB, by live share", "cycle", shares),
        Measure("offload, 24 MiB live, by size of the pool", "cycle", pools),
        Measure(f"resident set over {args.resident_cycles} cycles", "cycle", modes),
    ]


CASES = {
    "preemption": Case(
        about="A pool that is too small: for each demand, each way of preemption.\n\n"
        "All requests arrive at once, with prompts and lengths of a fixed seed. Demand is the blocks that all of them\n"
        "hold at their end, in multiples of the pool. `equal` counts the requests whose tokens are those of a pool\n"
        "that holds all of them.",
        prepare=preemption,
        rounds=1,
        warms_up=False,
        options={
            "model": "tiny",
            "pool": 64,
            "demand": "1,2,4,8",
            "rows": 64,
            "max_prompt": 96,
            "max_new": 96,
            "overlap": False,
            "threads": 1,
        },
    ),
    "suspend": Case(
        about="Suspends: by the live share of the pool, by the pool's size, and over many cycles.\n\n"
        "Live requests are real ones with random prompts. The first step is the one after the resume.",
        prepare=suspend,
        rounds=1,
        warms_up=False,
        options={"model": "smollm2", "pool_mib": 512.0, "cycles": 5, "resident_cycles": 200},
    ),
}
