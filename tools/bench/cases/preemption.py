"""Ways of preemption where the pool of keys and values is too small."""

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
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.tiny import tiny_gpt

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
    """All jobs at once, on a new engine; whole: their tokens where nothing is preempted, or empty."""
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
}
