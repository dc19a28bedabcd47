"""`megatron-infer bench`: throughput and latency of this engine on a workload, next to the limits of the machine.

tools/bench/peers.py measures other engines in the same rounds: `prepare` and `measure` are its library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from megatron_infer import __version__
from megatron_infer.cli.config_flags import METHOD_DEST, SYNTHETIC, add_bench_only_options, given
from megatron_infer.cli.loading import (
    add_model_options,
    describe,
    has_chat_template,
    load_llm,
    note,
    positive_int,
    whole_number,
)
from megatron_infer.cli.prompts import read_jobs, to_token_ids
from megatron_infer.config.inference import WeightDtype
from megatron_infer.config.model_shape import KV_DTYPE_BYTES, ModelShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.step_work import Ceiling, least_work
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.utils.child_process import ChildProcess
from megatron_infer.utils.host import CpuClock, cpu_has_bf16, cpu_name, resident_mib

OURS = "megatron_infer"
SUSPENDING = "megatron_infer, suspending"
OFF = "off"
"""This engine without speculation."""
QUIET_CORES = 0.1
"""A run is disturbed if other programs used more of the cores than this."""
SIZES: dict[str, Any] = {"num_requests": 32, "input_len": (64, 256), "output_len": (64, 128), "concurrency": 16}
"""Defaults of the options that describe one workload."""
SPIN = """
import sys, time
while True:
    until = time.perf_counter() + 0.01 * float(sys.argv[1])
    while time.perf_counter() < until:
        pass
    time.sleep(0.01 * (1 - float(sys.argv[1])))
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Random prompts, greedy answers of fixed lengths. Reports medians with their spread, and the "
        "shares of the machine's measured limits that were reached.",
    )
    add_options(parser)
    parser.add_argument(
        "--vs", type=_own_engine, metavar="off", help="also run this engine without --speculative, in the same rounds"
    )
    parser.set_defaults(run=run)


def _own_engine(text: str) -> str:
    if text != OFF:
        raise argparse.ArgumentTypeError(f"expected off, got {text!r}; tools/bench/peers.py measures other engines")
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options but `--vs`."""
    add_model_options(parser)
    parser.add_argument("--num-requests", type=positive_int, metavar="N", help="default 32")
    parser.add_argument("--input-len", type=parse_range, metavar="LOW:HIGH", help="prompt tokens, default 64:256")
    parser.add_argument("--output-len", type=parse_range, metavar="LOW:HIGH", help="answer tokens, default 64:128")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="JSON lines of prompts, as of `generate`, instead of random tokens",
    )
    parser.add_argument("--concurrency", type=positive_int, metavar="N", help="requests in flight at once, default 16")
    parser.add_argument(
        "--columns",
        metavar="NAME,...",
        help="instead of one workload those of a table: single (one stream, 128 to 128 tokens), a number N (that "
        "many at once, 64:256 to 64:128), prefill (4 prompts of 1,024), rl (8 prompts with 8 samples each)",
    )
    parser.add_argument(
        "--shared-prefix", type=whole_number, default=0, metavar="N", help="leading tokens common to all prompts"
    )
    parser.add_argument("--workload-seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--suspend-every",
        type=whole_number,
        default=0,
        metavar="N",
        help="also run with a suspend and resume every N steps, in the mode of --kv-cache-management-mode; 0: never",
    )
    add_bench_only_options(parser)
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N")
    parser.add_argument(
        "--background-load", type=float, default=0.0, metavar="CORES", help="keep that much of a core busy meanwhile"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    """-> 0. Raises InferenceError if the engine does not load or a request fails."""
    report_path = open_report(args.json)
    measure(prepare(args, with_off=args.vs == OFF), report_path)
    return 0


# ---------------------------------------------------------------------- workloads

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


def run_engine(engine: Any, workload: Workload, *, suspend_every: int = 0, company: Sequence[int] = ()) -> RunResult:
    """Run a workload on an engine with at most `concurrency` requests in flight.

    suspend_every: steps between suspends with running requests, each resumed at once; 0: none.
    company: processes whose use of the cores is meant to be there.
    """
    suspensions: list[dict[str, Any]] = []
    count, samples = len(workload.prompts), workload.num_samples
    kind: dict[str, Any] = {"temperature": 0.0} if samples == 1 else {"temperature": 1.0, "n": samples, "logprobs": 0}
    arrivals = [0.0] * (count * samples)
    times: list[list[float]] = [[] for _ in range(count * samples)]
    outputs: list[list[int]] = [[] for _ in range(count * samples)]
    index_of: dict[str, int] = {}
    before, clock, added = engine.stats(), CpuClock.now(company), 0
    started = clock.wall
    while index_of or added < count:
        while added < count and len(index_of) < workload.concurrency:
            params = SamplingParams(max_tokens=workload.output_lens[added], ignore_eos=True, detokenize=False, **kind)
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


# ---------------------------------------------------------------------- engines and rounds


Runner = Callable[[Workload], RunResult | None]


class Peer(Protocol):
    """Another engine that is measured in the same rounds."""

    @property
    def name(self) -> str: ...

    def warm_up(self, workload: Workload) -> None: ...

    def run(self, workload: Workload, *, company: Sequence[int] = ()) -> RunResult | None:
        """None: the engine cannot run the workload.

        company: processes whose use of the cores is part of the benchmark.
        """

    def facts(self) -> dict[str, Any]:
        """`version`, `start_s` and `rss_mib`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The loaded engines of this package, and the workloads by name."""

    args: argparse.Namespace
    llms: dict[str, Any]
    """OURS, and OFF if it is measured."""
    facts: dict[str, dict[str, Any]]
    """Version and seconds of loading, of each LLM."""
    workloads: dict[str, Workload]
    sizes: dict[str, dict[str, Any]]
    """The sizes of each workload, as `make_workload` takes them."""

    @property
    def engine(self) -> Any:
        return self.llms[OURS].engine

    @property
    def shape(self) -> ModelShape:
        shape: ModelShape = self.engine.shape
        return shape

    @property
    def device(self) -> str:
        return str(next(self.engine.model.parameters()).device)

    @property
    def drafting(self) -> dict[str, Any]:
        """The speculative options that were given."""
        return given(self.args).get("speculative") or {}


def prepare(args: argparse.Namespace, *, with_off: bool = False) -> Benchmark:
    """Load the model and draw the workloads. Raises ConfigError, mostly before the model is loaded."""
    if not 0 <= args.background_load < 1:
        raise ConfigError(f"--background-load is {args.background_load:g}, it must be from 0 to below 1")
    if with_off and not given(args).get("speculative"):
        raise ConfigError("--vs off is this engine without --speculative, which is not given; add --speculative ngram")
    sizes, llms, facts = _sizes(args), {}, {}
    for name in [OURS, OFF][: 1 + with_off]:
        started = time.perf_counter()
        changed = {} if name == OURS else {METHOD_DEST: "none"}
        llms[name] = load_llm(argparse.Namespace(**vars(args) | changed))
        facts[name] = {"version": __version__, "start_s": time.perf_counter() - started}
    if args.prompts_file is not None:
        workloads = {name: _workload_of_file(args.prompts_file, llms[OURS], size) for name, size in sizes.items()}
        sizes = {name: workload.sizes for name, workload in workloads.items()}
    else:
        drawn = {"token_ids": _plain_ids(llms[OURS]), "seed": args.workload_seed, "shared_prefix": args.shared_prefix}
        workloads = {name: make_workload(**size, **drawn) for name, size in sizes.items()}
    return Benchmark(args=args, llms=llms, facts=facts, workloads=workloads, sizes=sizes)


def measure(benchmark: Benchmark, report_path: Path | None, peers: Sequence[Peer] = ()) -> dict[str, Any]:
    """Run all workloads, print their figures and write the report -> the report."""
    args, engine, drafting = benchmark.args, benchmark.engine, benchmark.drafting
    print(f"{args.model}: {describe(benchmark.llms[OURS])}, {cpu_name()}")
    ceiling = measure_ceiling(benchmark.shape.dtype, benchmark.device)
    report: dict[str, Any] = {
        "model": args.model,
        "shape": asdict(benchmark.shape),
        "versions": _versions(),
        "settings": _settings(benchmark),
        "columns": {},
        "ceiling": asdict(ceiling),
    }
    with _background(args.background_load) as company:
        for name, workload in benchmark.workloads.items():
            print(
                f"{name}: {len(workload.prompts)} requests, {workload.num_input_tokens:,} prompt + "
                f"{workload.num_output_tokens:,} answer tokens, {workload.concurrency} at once, {args.rounds} rounds"
            )
            _warm_up(benchmark, peers, workload.head())
            before = engine.spec_decode_metrics()
            results = interleave(_runners(benchmark, peers, company), workload, args.rounds)
            found = summarize_column(results, workload, engine, ceiling)
            if before is not None:
                found["speculation"] = summarize_drafts(before, engine.spec_decode_metrics(), drafting.get(SYNTHETIC))
            if args.suspend_every > 0:
                found["suspend"] = summarize_suspensions(results[SUSPENDING], results[OURS], every=args.suspend_every)
            report["columns"][name] = found
            _write(report, report_path)  # figures that exist are kept if a later workload fails
            if args.columns is None:
                print(render(found, report["ceiling"], workload))
            if before is not None:
                print(render_drafts(found["speculation"]))
    ours = {name: {**one, "rss_mib": resident_mib(os.getpid())} for name, one in benchmark.facts.items()}
    report["engines"] = ours | {peer.name: peer.facts() for peer in peers}
    if len(report["engines"]) > 1 or args.columns is not None:
        print(render_table(report))
    _write(report, report_path)
    return report


def _warm_up(benchmark: Benchmark, peers: Sequence[Peer], head: Workload) -> None:
    note("warming up ...")
    for llm in benchmark.llms.values():
        run_engine(llm.engine, head)
    for peer in peers:
        note(f"warming up {peer.name} ...")
        peer.warm_up(head)


def _runners(benchmark: Benchmark, peers: Sequence[Peer], company: Sequence[int]) -> dict[str, Runner]:
    """What runs a workload, by the engine's name."""

    def ours(engine: Any, suspend_every: int = 0) -> Runner:
        def run_ours(workload: Workload) -> RunResult:
            engine.reset_prefix_cache()  # a round finds no earlier round's blocks
            return run_engine(engine, workload, suspend_every=suspend_every, company=company)

        return run_ours

    runners = {name: ours(llm.engine) for name, llm in benchmark.llms.items()}
    if benchmark.args.suspend_every > 0:
        runners[SUSPENDING] = ours(benchmark.engine, benchmark.args.suspend_every)
    return runners | {peer.name: partial(peer.run, company=company) for peer in peers}


def _workload_of_file(path: str, llm: Any, size: dict[str, Any]) -> Workload:
    """The prompts of a file, each with an answer of the longest length asked for. Raises ConfigError."""
    prompts, length = [], size["output_len"][1]
    for job in read_jobs(path):
        if job.error is not None or job.sampling:
            reason = job.error or f"answers are greedy and of one length; leave {', '.join(job.sampling or ())} out"
            raise ConfigError(f"--prompts-file: {job.where}: {reason}")
        prompt = to_token_ids(job, llm.tokenizer, chat=has_chat_template(llm))
        prompts.append(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if not prompts:
        raise ConfigError(f"--prompts-file: {path} has no prompts")
    concurrency = min(size["concurrency"], len(prompts))
    return Workload(prompts=prompts, output_lens=[length] * len(prompts), concurrency=concurrency)


def _plain_ids(llm: Any) -> list[int]:
    tokenizer = llm.tokenizer
    special = set() if tokenizer is None else tokenizer.special_ids | set(tokenizer.eos_ids)
    return [i for i in range(llm.engine.shape.vocab_size) if i not in special]


def _sizes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sizes of each workload by its name, from --columns or from the options of one."""
    if args.prompts_file is not None:
        others = ("columns", "num_requests", "input_len", "shared_prefix")
        if given_too := next((name for name in others if getattr(args, name)), None):
            option = "--" + given_too.replace("_", "-")
            raise ConfigError(f"{option} is of random prompts, and --prompts-file gives them; leave one of both out")
    typed = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.columns is None:
        sizes = SIZES | typed
        return {"workload": {**sizes, "concurrency": min(sizes["concurrency"], sizes["num_requests"])}}
    if typed:
        option = "--" + next(iter(typed)).replace("_", "-")
        raise ConfigError(f"{option} describes one workload, and --columns has its own; give one of both")
    return {name: column(name) for name in args.columns.split(",")}


def interleave(runners: Mapping[str, Runner], workload: Workload, num_rounds: int) -> dict[str, list[RunResult]]:
    """Run every engine once a round; rounds start with different engines, so that none always runs first.

    A run that others disturbed is repeated, at most `num_rounds` times for an engine; the quieter one of both counts.
    Engines that cannot run the workload are left out.
    """
    names = list(runners)
    results: dict[str, list[RunResult]] = {name: [] for name in names}
    repeats = dict.fromkeys(names, num_rounds)
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            if name not in results:
                continue
            result = runners[name](workload)
            if result is None:
                del results[name]
                continue
            while (result.other_load or 0.0) > QUIET_CORES and repeats[name]:
                repeats[name] -= 1
                note(f"round {index + 1}: {name} repeated, others used {result.other_load:.2f} cores")
                again = runners[name](workload)
                if again is None:
                    break
                result = min(result, again, key=lambda one: one.other_load or 0.0)
            results[name].append(result)
            busy = "" if result.other_load is None else f", others used {result.other_load:.2f} cores"
            note(f"round {index + 1}: {name} {workload.num_counted_tokens / result.seconds:.1f} tok/s{busy}")
    return results


@contextlib.contextmanager
def _background(cores: float) -> Iterator[list[int]]:
    """A process that uses a share of a core -> its id; none for 0."""
    if not cores:
        yield []
        return
    with ChildProcess([sys.executable, "-c", SPIN, str(cores)]) as process:
        try:
            yield [process.pid]
        finally:
            process.end()


def _versions() -> dict[str, str]:
    import torch

    return {
        "megatron_infer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _settings(benchmark: Benchmark) -> dict[str, Any]:
    import torch

    names = ("shared_prefix", "workload_seed", "rounds", "background_load")
    return {
        **{name: getattr(benchmark.args, name) for name in names},
        "sizes": benchmark.sizes,
        "device": benchmark.device,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def open_report(path: str | None) -> Path | None:
    """The report's path. Raises InferenceError at the start if it cannot be written."""
    if path is None:
        return None
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from error


# ---------------------------------------------------------------------- limits of the machine


def measure_ceiling(dtype: str, device: str, *, megabytes: int = 512, size: int = 2048) -> Ceiling:
    """Best of five: the sum of a tensor much larger than any cache, and a square matmul in the model's dtype.

    The matmul is in float32 on a CPU without products of bfloat16: such a CPU multiplies these models in float32.
    """
    import torch

    kind = getattr(torch, dtype) if device != "cpu" or cpu_has_bf16() else torch.float32
    large = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32, device=device)
    a = torch.randn(size, size, device=device).to(kind)
    b = torch.randn(size, size, device=device).to(kind)
    read_s = _best(lambda: large.sum())
    gemm_s = _best(lambda: a @ b)
    return Ceiling(read_gb_s=large.nbytes / read_s / 1e9, gemm_gflop_s=2 * size**3 / gemm_s / 1e9)


def _best(action: Callable[[], Any]) -> float:
    action()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        float(action().flatten()[0])  # reading a value waits for it on any device
        times.append(time.perf_counter() - started)
    return min(times)


# ---------------------------------------------------------------------- figures


def summarize_column(
    results: Mapping[str, list[RunResult]], workload: Workload, engine: Any, ceiling: Ceiling
) -> dict[str, Any]:
    """The figures of one workload: of each engine, its least work, and our rate over that of the fastest peer."""
    shape = engine.shape
    config = engine.config
    kv_dtype_bytes = KV_DTYPE_BYTES[config.kv_dtype_of(shape)]
    weight_dtype = WeightDtype(config.weight_dtype).value
    work = least_work(
        shape,
        [len(prompt) for prompt in workload.prompts],
        workload.output_lens,
        concurrency=workload.concurrency,
        num_samples=workload.num_samples,
        kv_dtype_bytes=kv_dtype_bytes,
        weight_dtype=weight_dtype,
    )
    engines = {name: summarize(runs, workload) for name, runs in results.items()}
    for name, summary in engines.items():
        seconds = summary["seconds"]["median"]
        summary["shares"] = {
            "bandwidth": work.bytes / seconds / (ceiling.read_gb_s * 1e9),
            "flops": work.flops / seconds / (ceiling.gemm_gflop_s * 1e9),
            "bound": work.best_seconds(ceiling) / seconds,
        }
        if name not in (OURS, SUSPENDING) and workload.num_samples == 1:
            pairs = zip(results[name][0].outputs, results[OURS][0].outputs, strict=True)
            summary["same_first_tokens"] = sum(theirs[0] == ours[0] for theirs, ours in pairs)
    return {
        "engines": engines,
        "least_work": {**asdict(work), "best_seconds": work.best_seconds(ceiling)},
        "ratio": ratio(engines),
    }


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
    return {name: distribution(values) for name, values in series.items() if values}


def distribution(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99."""
    return {"mean": statistics.fmean(values), **{f"p{p}": percentile(values, p) for p in (50, 90, 99)}}


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation; values must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(results: list[RunResult], workload: Workload) -> dict[str, Any]:
    """Medians and spread over the rounds; latencies and counters are those of the round with the median time.

    tok_s counts the tokens of the answers, or those of the prompts where answers have one token.
    """
    middle = sorted(results, key=lambda r: r.seconds)[len(results) // 2]
    total = workload.num_output_tokens + workload.num_input_tokens
    return {
        "seconds": _spread([r.seconds for r in results]),
        "tok_s": _spread([workload.num_counted_tokens / r.seconds for r in results]),
        "total_tok_s": _spread([total / r.seconds for r in results]),
        "latency": latency_summary(middle),
        "single_stream_decode_tok_s": _decode_rate(middle) if workload.concurrency == 1 else None,
        "details": middle.details,
        "rounds": [{"seconds": r.seconds, "other_load": r.other_load} for r in results],
    }


def ratio(engines: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Our median rate over the fastest peer's; None without a peer."""
    peers = {name: s["tok_s"] for name, s in engines.items() if name not in (OURS, SUSPENDING)}
    if not peers:
        return None
    best = max(peers, key=lambda name: peers[name]["median"])
    ours = engines[OURS]["tok_s"]
    return {
        "peer": best,
        "tok_s": ours["median"] / peers[best]["median"],
        "worst_case": ours["min"] / peers[best]["max"],
    }


def summarize_drafts(before: Any, after: Any, synthetic: float | None = None) -> dict[str, Any]:
    """Drafted and kept tokens between two `SpecDecodeMetrics`, in all and by position.

    synthetic: the `synthetic_acceptance_rate` of the run.
    """
    drafted, kept = (
        [new - old for new, old in zip(getattr(after, name), getattr(before, name), strict=True)]
        for name in ("drafted_per_position", "accepted_per_position")
    )
    steps = after.num_verifications - before.num_verifications
    return {
        "num_drafted": sum(drafted),
        "num_accepted": sum(kept),
        "drafted_per_position": drafted,
        "accepted_per_position": kept,
        "tokens_per_verification": 1 + sum(kept) / max(1, steps),
        "seconds_drafting": after.seconds_drafting - before.seconds_drafting,
        "synthetic_acceptance_rate": synthetic,
    }


def render_drafts(found: Mapping[str, Any]) -> str:
    """One line."""
    if not found["num_drafted"]:
        return "nothing was drafted"
    pairs = zip(found["accepted_per_position"], found["drafted_per_position"], strict=True)
    places = " ".join(f"{kept / drafted:.0%}" for kept, drafted in pairs if drafted)
    rate = found["synthetic_acceptance_rate"]
    return ("" if rate is None else f"SYNTHETIC: drafts kept at rate {rate:g}, tokens mean nothing; ") + (
        f"drafts: {found['num_accepted']:,} of {found['num_drafted']:,} kept, by position {places}; "
        f"{found['tokens_per_verification']:.1f} tokens a verification; {found['seconds_drafting']:.2f} s of drafting"
    )


def summarize_suspensions(suspending: list[RunResult], plain: list[RunResult], *, every: int) -> dict[str, Any]:
    """Medians over every suspend and resume of all rounds, and whether the tokens equal those without suspends."""
    reports = [report for result in suspending for report in result.suspensions]
    by_command = {
        command: _summary_of_reports([report for report in reports if report["command"] == command])
        for command in ("suspend", "resume")
    }
    return {
        "every": every,
        "mode": reports[0]["mode"] if reports else None,
        "cycles": len(reports) // 2,
        "tokens_identical": all(result.outputs == plain[0].outputs for result in [*suspending, *plain]),
        "commands": by_command,
    }


def _summary_of_reports(reports: list[dict[str, Any]]) -> dict[str, Any]:
    if not reports:
        return {}
    seconds = [report["seconds"] for report in reports]
    tags: dict[str, dict[str, float]] = {}
    for report in reports:
        for tag in report["tags"]:
            rows = [other["tags"][tag] for other in reports if tag in other["tags"]]
            tags[tag] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "seconds": _spread(seconds),
        "requests": statistics.median(report["num_requests"] for report in reports),
        "tags": tags,
    }


def _decode_rate(result: RunResult) -> float | None:
    if result.token_times is None:
        return None
    gaps = sum(len(times) - 1 for times in result.token_times)
    seconds = sum(times[-1] - times[0] for times in result.token_times)
    return gaps / seconds if seconds > 0 else None


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# ---------------------------------------------------------------------- text


def render_table(report: Mapping[str, Any]) -> str:
    """Markdown: a row for each workload, a column for each engine, in tokens per second."""
    measured = {name for row in report["columns"].values() for name in row["engines"]}
    engines = {name: one for name, one in report["engines"].items() if name in measured}
    titles = [f"{name} {one['version']}" for name, one in engines.items()]
    lines = ["", f"| tok/s: median (min..max), share of the bound | {' | '.join(titles)} | against the best |"]
    lines.append("|---" * (len(titles) + 2) + "|")
    for name, row in report["columns"].items():
        cells = []
        for engine in engines:
            found = row["engines"].get(engine)
            if found is None:
                cells.append("-")
                continue
            rate, bound = found["tok_s"], found["shares"]["bound"]
            cells.append(f"{rate['median']:,.0f} ({rate['min']:,.0f}..{rate['max']:,.0f}) {bound:.0%}")
        ratio = "" if row["ratio"] is None else f"{row['ratio']['tok_s']:.2f}x {row['ratio']['peer']}"
        lines.append(f"| {_title(name, report['settings']['sizes'][name])} | {' | '.join(cells)} | {ratio} |")
    starts = [f"{one['start_s']:.1f}; {one['rss_mib']:,.0f}" for one in engines.values()]
    lines.append(f"| start, s; resident memory, MiB | {' | '.join(starts)} | |")
    limits, settings = report["ceiling"], report["settings"]
    company = f", {settings['background_load']:g} of a core kept busy" if settings["background_load"] else ""
    lines += [
        "",
        f"{settings['cpu']}, {settings['threads']} threads, {report['shape']['dtype']}, {settings['rounds']} rounds"
        f"{company}; read {limits['read_gb_s']:.1f} GB/s, matrix product {limits['gemm_gflop_s']:,.0f} GFLOP/s",
    ]
    runs = [r for row in report["columns"].values() for one in row["engines"].values() for r in one["rounds"]]
    if loud := [r["other_load"] for r in runs if (r["other_load"] or 0.0) > QUIET_CORES]:
        lines.append(
            f"other programs used more than {QUIET_CORES} of a core in {len(loud)} of {len(runs)} runs, "
            f"at most {max(loud):.2f}: repeat on an idle machine"
        )
    return "\n".join(lines)


def _title(name: str, size: Mapping[str, Any]) -> str:
    """A workload in words."""
    prompt, answer = (
        str(low) if low == high else f"{low} to {high}" for low, high in (size["input_len"], size["output_len"])
    )
    if name == "single":
        return f"one stream, {prompt} -> {answer}"
    if name == "prefill":
        return f"prefill, {size['num_requests']} x {prompt}"
    samples = size.get("num_samples", 1)
    each = "" if samples == 1 else f" x {samples} samples, T = 1, log probabilities"
    return f"{size['num_requests']} prompts{each}, {size['concurrency'] * samples} at once, {prompt} -> {answer}"


def render(report: Mapping[str, Any], ceiling: Mapping[str, float], workload: Workload) -> str:
    """One workload (a report of `summarize_column`) in detail."""
    width = max(len(name) for name in report["engines"])
    lines = ["", f"{'':{width}}         tok/s (min..max)     total tok/s   bandwidth  FLOPs  of the bound"]
    for name, s in report["engines"].items():
        o, shares = s["tok_s"], s["shares"]
        lines.append(
            f"{name:{width}}  {o['median']:9.1f} ({o['min']:.1f}..{o['max']:.1f})".ljust(width + 29)
            + f" {s['total_tok_s']['median']:11.1f}  {shares['bandwidth']:9.0%}  {shares['flops']:5.0%}"
            + f"  {shares['bound']:11.0%}"
        )
    c, best = ceiling, report["least_work"]["best_seconds"]
    lines.append(
        f"limits measured here: read {c['read_gb_s']:.1f} GB/s, matrix product {c['gemm_gflop_s']:,.0f} GFLOP/s; "
        f"they bound this workload at {workload.num_counted_tokens / best:,.0f} tok/s"
    )
    for name, values in report["engines"][OURS]["latency"].items():
        figures = "  ".join(f"{key} {value:.1f}" for key, value in values.items())
        lines.append(f"{name.removesuffix('_ms').upper():4} ms  {figures}")
    details = report["engines"][OURS]["details"]
    lines.append("  ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in details.items()))
    if (rate := report["engines"][OURS]["single_stream_decode_tok_s"]) is not None:
        lines.append(f"single-stream decode {rate:.1f} tok/s")
    if "suspend" in report:
        lines += render_suspensions(report["suspend"])
    if report["ratio"] is not None:
        r = report["ratio"]
        lines.append(
            f"ratio: {r['tok_s']:.2f}x {r['peer']}, the fastest peer (our slowest round over its fastest: "
            f"{r['worst_case']:.2f}x)"
        )
    busy = [r["other_load"] for s in report["engines"].values() for r in s["rounds"] if r["other_load"] is not None]
    if busy and max(busy) > QUIET_CORES:
        lines.append(f"other programs used up to {max(busy):.2f} cores: repeat on an idle machine")
    return "\n".join(lines)


def render_suspensions(summary: dict[str, Any]) -> list[str]:
    """Lines of the report."""
    if not summary["cycles"]:
        return [f"no suspend happened: the workload ended before step {summary['every']}"]
    same = "identical to" if summary["tokens_identical"] else "DIFFERENT from"
    lines = [
        f"{summary['cycles']} suspends, one every {summary['every']} steps, mode {summary['mode']}: tokens {same} "
        "those without"
    ]
    for command, one in summary["commands"].items():
        s = one["seconds"]
        lines.append(
            f"{command:<8} {s['median'] * 1e3:8.1f} ms ({s['min'] * 1e3:.1f}..{s['max'] * 1e3:.1f}), "
            f"{one['requests']:.0f} requests held"
        )
        for tag, row in one["tags"].items():
            freed, copied, resident = (row[name] / 2**20 for name in ("bytes_freed", "bytes_copied", "bytes_resident"))
            lines.append(
                f"  {tag:<10} freed {freed:9.1f} MiB   copied {copied:9.1f} MiB   resident {resident:9.1f} MiB"
            )
    return lines
