"""Workloads of benchmarks and their measurements, the same for every engine."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of random tokens, and the number of output tokens of each."""

    prompts: list[list[int]]
    output_lens: list[int]
    concurrency: int
    """Most requests in flight at once."""

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def parse_range(text: str) -> tuple[int, int]:
    """ "64:256" -> (64, 256), "128" -> (128, 128); both ends included."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH or a number, got {text!r}") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"expected 1 <= LOW <= HIGH, got {text!r}")
    return bounds


def make_workload(
    *,
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    concurrency: int,
    token_ids: Sequence[int],
    seed: int,
    shared_prefix: int = 0,
) -> Workload:
    """Lengths are uniform in their ranges, tokens over `token_ids`; all prompts share their first `shared_prefix`."""
    draw = random.Random(seed)
    prefix = draw.choices(token_ids, k=shared_prefix)
    lengths = [(draw.randint(*input_len), draw.randint(*output_len)) for _ in range(num_requests)]
    prompts = [(prefix + draw.choices(token_ids, k=size))[: max(size, shared_prefix + 1)] for size, _ in lengths]
    return Workload(prompts=prompts, output_lens=[size for _, size in lengths], concurrency=concurrency)


@dataclass(slots=True, kw_only=True)
class RunResult:
    """One run of an engine over a workload. Times are in seconds since its start; None: not measured."""

    seconds: float
    arrivals: list[float] = field(default_factory=list)
    token_times: list[list[float]] | None = None
    """Times of the tokens of each request."""
    outputs: list[list[int]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    suspensions: list[dict[str, Any]] = field(default_factory=list)
    """Reports of the suspends and resumes (MemoryReport.to_dict), in order."""
    other_load: float | None = None
    """Cores that other processes used meanwhile, which makes the figures unreliable."""


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds of this process and of the whole machine at a moment."""

    wall: float
    own: float
    machine: float | None

    @classmethod
    def now(cls) -> CpuClock:
        times = os.times()
        return cls(time.perf_counter(), times.user + times.system, _machine_busy_s())

    def other_load(self, since: CpuClock) -> float | None:
        """Cores used by other processes since then; None where the system does not report it."""
        if self.machine is None or since.machine is None:
            return None
        busy = (self.machine - since.machine) - (self.own - since.own)
        return max(0.0, busy / max(self.wall - since.wall, 1e-9))


def _machine_busy_s() -> float | None:
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            user, nice, system, _, _, irq, softirq, steal = map(int, lines.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation; values must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_summary(result: RunResult) -> dict[str, dict[str, float]]:
    """TTFT, inter-token latency (each gap) and TPOT (each request's mean gap) in ms: mean, p50, p90, p99."""
    if result.token_times is None:
        return {}
    series: dict[str, list[float]] = {"ttft_ms": [], "itl_ms": [], "tpot_ms": []}
    for arrival, times in zip(result.arrivals, result.token_times, strict=True):
        series["ttft_ms"].append((times[0] - arrival) * 1e3)
        series["itl_ms"] += [(b - a) * 1e3 for a, b in pairwise(times)]
        if len(times) > 1:
            series["tpot_ms"].append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
    return {
        name: {"mean": statistics.fmean(values), **{f"p{p}": percentile(values, p) for p in (50, 90, 99)}}
        for name, values in series.items()
        if values
    }


def run_engine(engine: Any, params_type: type, workload: Workload, *, suspend_every: int = 0) -> RunResult:
    """Run a workload on an engine with at most `concurrency` requests in flight.

    suspend_every: steps between suspends with running requests, each resumed at once; 0: none.
    """
    suspensions: list[dict[str, Any]] = []
    count = len(workload.prompts)
    arrivals, times, outputs = [0.0] * count, [[] for _ in range(count)], [[] for _ in range(count)]
    index_of: dict[str, int] = {}
    before, clock, added = engine.stats(), CpuClock.now(), 0
    started = clock.wall
    while index_of or added < count:
        while added < count and len(index_of) < workload.concurrency:
            params = params_type(
                max_tokens=workload.output_lens[added], temperature=0.0, ignore_eos=True, detokenize=False
            )
            arrivals[added] = time.perf_counter() - started
            index_of[engine.add_request(workload.prompts[added], params)] = added
            added += 1
        if suspend_every and engine.num_steps > before.num_steps and not engine.num_steps % suspend_every:
            suspensions += [engine.suspend().to_dict(), engine.resume().to_dict()]
        for output in engine.step():
            index = index_of[output.request_id]
            if output.error is not None:
                raise output.error
            tokens = output.outputs[0].token_ids
            times[index] += [time.perf_counter() - started] * (len(tokens) - len(times[index]))
            if output.finished:
                outputs[index] = tokens
                del index_of[output.request_id]
    end = CpuClock.now()
    after = engine.stats()
    counters = {name: value - before.counters.get(name, 0) for name, value in after.counters.items()}
    return RunResult(
        seconds=end.wall - started,
        arrivals=arrivals,
        token_times=times,
        outputs=outputs,
        details={"steps": after.num_steps - before.num_steps, **counters},
        suspensions=suspensions,
        other_load=end.other_load(clock),
    )
