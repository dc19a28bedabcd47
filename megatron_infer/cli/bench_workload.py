"""Workloads of `bench`, `bench-serve` and tools/bench, and one run of a workload on an engine."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from megatron_infer.errors import ConfigError
from megatron_infer.utils.host import CpuClock

NAMED_COLUMNS: dict[str, dict[str, Any]] = {
    "single": {"num_requests": 2, "input_len": (128, 128), "output_len": (128, 128), "concurrency": 1},
    "prefill": {"num_requests": 4, "input_len": (1024, 1024), "output_len": (1, 1), "concurrency": 4},
    "rl": {
        "num_requests": 8,
        "input_len": (64, 256),
        "output_len": (128, 128),
        "concurrency": 8,
        "num_samples": 8,
    },
}
"""One stream; prompts alone; rollouts with 8 samples of each prompt at temperature 1, with log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of random tokens, and the number of output tokens of each."""

    prompts: list[list[int]]
    output_lens: list[int]
    concurrency: int
    """Most requests in flight at once."""
    num_samples: int = 1
    """Answers to each prompt: one is drawn greedily, several at temperature 1 with log probabilities."""

    @property
    def sizes(self) -> dict[str, Any]:
        """In the form of `column`."""
        inputs, outputs = list(map(len, self.prompts)), self.output_lens
        lengths = {"input_len": (min(inputs), max(inputs)), "output_len": (min(outputs), max(outputs))}
        return {"num_requests": len(inputs), "concurrency": self.concurrency, **lengths}

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens) * self.num_samples

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that its rate counts: those of the answers, or of the prompts where answers have one token."""
        return self.num_input_tokens if max(self.output_lens) == 1 else self.num_output_tokens

    def head(self) -> Workload:
        """A few short requests, at the full batch size, to warm up every path."""
        count = self.concurrency
        return replace(self, prompts=self.prompts[:count], output_lens=[min(n, 8) for n in self.output_lens[:count]])


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


def column(name: str) -> dict[str, Any]:
    """The sizes of a column of the benchmark's table, for `make_workload`. Raises ConfigError for an unknown name."""
    if name in NAMED_COLUMNS:
        return NAMED_COLUMNS[name]
    if not name.isdecimal() or int(name) < 1:
        known = ", ".join(NAMED_COLUMNS)
        raise ConfigError(f"--columns: {name!r} is neither a number of requests at once nor one of {known}")
    at_once = int(name)
    lengths = {"input_len": (64, 256), "output_len": (64, 128)}
    return {"num_requests": max(32, at_once), "concurrency": at_once, **lengths}


def make_workload(
    *,
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    concurrency: int,
    token_ids: Sequence[int],
    seed: int,
    shared_prefix: int = 0,
    num_samples: int = 1,
) -> Workload:
    """Lengths are uniform in their ranges, tokens over `token_ids`; all prompts share their first `shared_prefix`."""
    draw = random.Random(seed)
    prefix = draw.choices(token_ids, k=shared_prefix)
    lengths = [(draw.randint(*input_len), draw.randint(*output_len)) for _ in range(num_requests)]
    prompts = [(prefix + draw.choices(token_ids, k=size))[: max(size, shared_prefix + 1)] for size, _ in lengths]
    output_lens = [size for _, size in lengths]
    return Workload(prompts=prompts, output_lens=output_lens, concurrency=concurrency, num_samples=num_samples)


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


def run_engine(
    engine: Any, params_type: type, workload: Workload, *, suspend_every: int = 0, company: Sequence[int] = ()
) -> RunResult:
    """Run a workload on an engine with at most `concurrency` requests in flight.

    suspend_every: steps between suspends with running requests, each resumed at once; 0: none.
    company: processes whose use of the cores is meant to be there.
    """
    suspensions: list[dict[str, Any]] = []
    count, samples = len(workload.prompts), workload.num_samples
    kind = {"temperature": 0.0} if samples == 1 else {"temperature": 1.0, "n": samples, "logprobs": 0}
    arrivals = [0.0] * (count * samples)
    times: list[list[float]] = [[] for _ in range(count * samples)]
    outputs: list[list[int]] = [[] for _ in range(count * samples)]
    index_of: dict[str, int] = {}
    before, clock, added = engine.stats(), CpuClock.now(company), 0
    started = clock.wall
    while index_of or added < count:
        while added < count and len(index_of) < workload.concurrency:
            params = params_type(max_tokens=workload.output_lens[added], ignore_eos=True, detokenize=False, **kind)
            arrivals[added * samples : (added + 1) * samples] = [time.perf_counter() - started] * samples
            index_of[engine.add_request(workload.prompts[added], params)] = added
            added += 1
        if suspend_every and engine.num_steps > before.num_steps and not engine.num_steps % suspend_every:
            suspensions += [engine.suspend().to_dict(), engine.resume().to_dict()]
        for output in engine.step():
            index = index_of[output.request_id]
            if output.error is not None:
                raise output.error
            now = time.perf_counter() - started
            for sample, answer in enumerate(output.outputs, start=index * samples):
                times[sample] += [now] * (len(answer.token_ids) - len(times[sample]))
                if output.finished:
                    outputs[sample] = answer.token_ids
            if output.finished:
                del index_of[output.request_id]
    end = CpuClock.now(company)
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


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation; values must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
