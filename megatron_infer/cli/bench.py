"""`megatron-infer bench`: throughput and latency of a workload, beside the machine's limits and other engines."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_infer import __version__
from megatron_infer.cli.bench_peers import PEERS, parse_pythons, peers_of, resident_mib
from megatron_infer.cli.bench_plot import plot_engines, require_matplotlib
from megatron_infer.cli.bench_report import (
    OFF,
    OURS,
    SUSPENDING,
    render,
    render_drafts,
    render_table,
    summarize_column,
    summarize_drafts,
)
from megatron_infer.cli.bench_suspend import summarize_suspensions
from megatron_infer.cli.bench_workload import (
    QUIET_CORES,
    RunResult,
    Workload,
    column,
    make_workload,
    parse_range,
    run_engine,
)
from megatron_infer.cli.config_flags import SPECULATIVE_DESTS, SYNTHETIC, add_bench_only_options, given
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
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.utils.child_process import ChildProcess

Runner = Callable[[Workload], RunResult | None]
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
        description="Random prompts, greedy answers of fixed lengths. Rounds of the engines are interleaved. Reports "
        "medians with their spread, and the shares of the machine's measured limits that were reached.",
    )
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
        "--vs",
        action="append",
        metavar="NAME,...",
        help=f"also run these engines on the same weights and workload: {', '.join(PEERS)}; off: this engine without "
        "--speculative",
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter of the environment in which a peer is installed (default: this one)",
    )
    parser.add_argument(
        "--background-load", type=float, default=0.0, metavar="CORES", help="keep that much of a core busy meanwhile"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", metavar="FILE", help="draw bars of the engines (PNG; needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0; 1 if a peer ended meanwhile. Raises InferenceError if an engine does not start or does not answer with the
    lengths asked for."""
    report_path = _open_report(args.json)
    if args.plot is not None:
        require_matplotlib()
        _open_report(args.plot)
    if not 0 <= args.background_load < 1:
        raise ConfigError(f"--background-load is {args.background_load:g}, it must be from 0 to below 1")
    names = _peer_names(args.vs)
    beside_off, drafting = OFF in names, given(args).get("speculative") or {}
    if beside_off and not drafting:
        raise ConfigError("--vs off is this engine without --speculative, which is not given; add --speculative ngram")
    pythons, sizes = parse_pythons(args.peer_python, [name for name in names if name != OFF]), _sizes(args)
    engines, facts = _load_engines(args, beside_off=beside_off)
    llm = engines[OURS]
    if args.prompts_file is not None:
        workloads = {name: _workload_of_file(args.prompts_file, llm, size) for name, size in sizes.items()}
        sizes = {name: workload.sizes for name, workload in workloads.items()}
    else:
        drawn = {"token_ids": _plain_ids(llm), "seed": args.workload_seed, "shared_prefix": args.shared_prefix}
        workloads = {name: make_workload(**size, **drawn) for name, size in sizes.items()}
    from megatron_infer.cli.bench_roofline import measure_ceiling  # imports torch

    shape, device = llm.engine.shape, _device(llm)
    settings = _settings(args, sizes, device)
    print(f"{args.model}: {describe(llm)}, {cpu_name()}")
    report: dict[str, Any] = {
        "model": args.model,
        "shape": asdict(shape),
        "versions": _versions(),
        "settings": settings,
        "columns": {},
    }
    with contextlib.ExitStack() as stack:
        planned = list(workloads.values())
        where = {"shape": shape, "device": device, "threads": settings["threads"], "workloads": planned}
        starting = peers_of(args.model, pythons, **where, assistant=drafting.get("draft_model"))
        peers = stack.enter_context(starting) if pythons else []
        report["ceiling"] = asdict(ceiling := measure_ceiling(shape.dtype, device))
        company = stack.enter_context(_background(args.background_load))
        for name, workload in workloads.items():
            print(
                f"{name}: {len(workload.prompts)} requests, {workload.num_input_tokens:,} prompt + "
                f"{workload.num_output_tokens:,} answer tokens, {workload.concurrency} at once, {args.rounds} rounds"
            )
            runners = _our_runners(engines, args.suspend_every, company)
            runners |= {peer.name: functools.partial(peer.run, company=company) for peer in peers}
            note("warming up ...")
            for ours in engines.values():
                run_engine(ours.engine, SamplingParams, workload.head())
            for peer in peers:
                note(f"warming up {peer.name} ...")
                peer.warm_up(workload.head())
            before, synthetic = llm.engine.spec_decode_metrics(), drafting.get(SYNTHETIC)
            results = interleave(runners, workload, args.rounds)
            found = summarize_column(results, workload, llm.engine, ceiling)
            if before is not None:
                found["speculation"] = summarize_drafts(before, llm.engine.spec_decode_metrics(), synthetic)
            if args.suspend_every > 0:
                found["suspend"] = summarize_suspensions(results[SUSPENDING], results[OURS], every=args.suspend_every)
            report["columns"][name] = found
            _write(report, report_path)  # what is measured is kept, whatever comes
            if args.columns is None:
                print(render(found, report["ceiling"], workload))
            if before is not None:
                print(render_drafts(found["speculation"]))
        own = {name: {**one, "rss_mib": resident_mib(os.getpid())} for name, one in facts.items()}
        report["engines"] = own | {peer.name: peer.facts() for peer in peers}
    if names or args.columns is not None:
        print(render_table(report))
    _write(report, report_path)
    if args.plot is not None:
        plot_engines(report, args.plot)
    return int(any(peer.failure is not None for peer in peers))


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


def _our_runners(engines: Mapping[str, Any], suspend_every: int, company: list[int]) -> dict[str, Runner]:
    def runner(llm: Any, every: int) -> Runner:
        def run_ours(workload: Workload) -> RunResult:
            llm.engine.reset_prefix_cache()  # hits come from the same round only
            return run_engine(llm.engine, SamplingParams, workload, suspend_every=every, company=company)

        return run_ours

    runners = {name: runner(llm, 0) for name, llm in engines.items()}
    return runners | ({SUSPENDING: runner(engines[OURS], suspend_every)} if suspend_every > 0 else {})


def _load_engines(args: argparse.Namespace, *, beside_off: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Our engines, with and, if asked for, without drafts, and what is known of each, by name."""
    engines, facts = {}, {}
    for name in [OURS, OFF][: 1 + beside_off]:
        started = time.perf_counter()
        changed = {} if name == OURS else {SPECULATIVE_DESTS["method"]: "none"}
        engines[name] = load_llm(argparse.Namespace(**vars(args) | changed))
        facts[name] = {"version": __version__, "start_s": time.perf_counter() - started}
    return engines, facts


def _peer_names(texts: list[str] | None) -> list[str]:
    names = [name for text in texts or () for name in text.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError(f"--vs {','.join(names)}: an engine is named twice; name each once")
    if unknown := [name for name in names if name not in (*PEERS, OFF)]:
        raise ConfigError(f"--vs: unknown engine {unknown[0]!r}; there are {', '.join(PEERS)} and off")
    return names


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


def _plain_ids(llm: Any) -> list[int]:
    tokenizer = llm.tokenizer
    special = set() if tokenizer is None else tokenizer.special_ids | set(tokenizer.eos_ids)
    return [i for i in range(llm.engine.shape.vocab_size) if i not in special]


def _device(llm: Any) -> str:
    return str(next(llm.engine.model.parameters()).device)


def cpu_name() -> str:
    """The processor's model name, if the system has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    import torch

    return {
        "megatron_infer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _settings(args: argparse.Namespace, sizes: dict[str, dict[str, Any]], device: str) -> dict[str, Any]:
    import torch

    names = ("shared_prefix", "workload_seed", "rounds", "background_load")
    return {
        **{name: getattr(args, name) for name in names},
        "sizes": sizes,
        "device": device,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _open_report(path: str | None) -> Path | None:
    """The report's path. Raises InferenceError at the start if it cannot be written."""
    if path is None:
        return None
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from error
