"""`megatron-infer bench`: throughput and latency of a workload, beside the machine's limits and transformers."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_infer.cli.bench_suspend import render_suspensions, summarize_suspensions
from megatron_infer.cli.bench_workload import (
    RunResult,
    Workload,
    latency_summary,
    make_workload,
    parse_range,
    run_engine,
)
from megatron_infer.cli.loading import add_model_options, describe, load_llm, note, positive_int
from megatron_infer.config.model_shape import KV_DTYPE_BYTES
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError

OURS = "megatron_infer"
SUSPENDING = "megatron_infer, suspending"
Runner = Callable[[], RunResult]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Random prompts, greedy answers of fixed lengths. Rounds of the engines are interleaved. Reports "
        "medians with their spread, and the shares of the machine's measured limits that were reached.",
    )
    add_model_options(parser)
    parser.add_argument("--num-requests", type=positive_int, default=32, metavar="N")
    parser.add_argument("--input-len", type=parse_range, default=(64, 256), metavar="LOW:HIGH", help="prompt tokens")
    parser.add_argument("--output-len", type=parse_range, default=(64, 128), metavar="LOW:HIGH", help="answer tokens")
    parser.add_argument("--concurrency", type=positive_int, default=16, metavar="N", help="requests in flight at once")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="leading tokens common to all prompts"
    )
    parser.add_argument("--workload-seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--suspend-every",
        type=int,
        default=0,
        metavar="N",
        help="also run with a suspend and resume every N steps, in the mode of --kv-cache-management-mode; 0: never",
    )
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N")
    parser.add_argument("--vs", choices=["transformers"], help="also run this engine, on the same weights and workload")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0. Raises InferenceError if an engine does not answer with the lengths asked for."""
    report_path = _open_report(args.json)
    llm = load_llm(args)
    workload = make_workload(
        num_requests=args.num_requests,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=min(args.concurrency, args.num_requests),
        token_ids=_plain_ids(llm),
        seed=args.workload_seed,
        shared_prefix=args.shared_prefix,
    )
    from megatron_infer.cli.bench_roofline import least_work, measure_ceiling  # imports torch

    shape = llm.engine.shape
    print(f"{args.model}: {describe(llm)}, {cpu_name()}")
    print(
        f"{len(workload.prompts)} requests, {workload.num_input_tokens:,} prompt + {workload.num_output_tokens:,} "
        f"answer tokens, {workload.concurrency} at once, {args.rounds} rounds"
    )
    runners: dict[str, Runner] = {OURS: lambda: run_engine(llm.engine, SamplingParams, _fresh(workload, llm))}
    if args.suspend_every > 0:
        runners[SUSPENDING] = lambda: run_engine(
            llm.engine, SamplingParams, _fresh(workload, llm), suspend_every=args.suspend_every
        )
    if args.vs is not None:
        runners |= _peers(args, llm, workload)
    note("warming up ...")
    run_engine(llm.engine, SamplingParams, _head(workload))
    device = _device(llm)
    ceiling = measure_ceiling(shape.dtype, device)
    rounds = interleave(runners, args.rounds)
    report = {
        "model": args.model,
        "shape": asdict(shape),
        "versions": _versions(),
        "settings": _settings(args, device),
        "ceiling": asdict(ceiling),
        "engines": {name: summarize(results, workload) for name, results in rounds.items()},
    }
    work = least_work(shape, workload, kv_dtype_bytes=KV_DTYPE_BYTES[llm.engine.config.kv_dtype_of(shape)])
    report["least_work"] = {**asdict(work), "best_seconds": work.best_seconds(ceiling)}
    for summary in report["engines"].values():
        seconds = summary["seconds"]["median"]
        summary["shares"] = {
            "bandwidth": work.bytes / seconds / (ceiling.read_gb_s * 1e9),
            "flops": work.flops / seconds / (ceiling.gemm_gflop_s * 1e9),
            "bound": work.best_seconds(ceiling) / seconds,
        }
    report["ratio"] = ratio(report["engines"])
    if args.suspend_every > 0:
        report["suspend"] = summarize_suspensions(rounds[SUSPENDING], rounds[OURS], every=args.suspend_every)
    print(render(report, workload))
    if report_path is not None:
        report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def interleave(runners: dict[str, Runner], num_rounds: int) -> dict[str, list[RunResult]]:
    """Run every engine once per round; rounds start with different engines, so that none always runs first."""
    names = list(runners)
    results: dict[str, list[RunResult]] = {name: [] for name in names}
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = runners[name]()
            results[name].append(result)
            tokens = sum(map(len, result.outputs))
            busy = "" if result.other_load is None else f", others used {result.other_load:.1f} cores"
            note(f"round {index + 1}: {name} {tokens / result.seconds:.1f} tok/s{busy}")
    return results


def summarize(results: list[RunResult], workload: Workload) -> dict[str, Any]:
    """Medians and spread over the rounds; latencies and counters are those of the round with the median time."""
    output = [workload.num_output_tokens / r.seconds for r in results]
    total = [(workload.num_output_tokens + workload.num_input_tokens) / r.seconds for r in results]
    middle = sorted(results, key=lambda r: r.seconds)[len(results) // 2]
    return {
        "seconds": _spread([r.seconds for r in results]),
        "output_tok_s": _spread(output),
        "total_tok_s": _spread(total),
        "latency": latency_summary(middle),
        "single_stream_decode_tok_s": _decode_rate(middle) if workload.concurrency == 1 else None,
        "details": middle.details,
        "other_load": [r.other_load for r in results],
    }


def ratio(engines: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Our median output rate over the faster peer's; None without a peer."""
    peers = {name: s["output_tok_s"] for name, s in engines.items() if name not in (OURS, SUSPENDING)}
    if not peers:
        return None
    best = max(peers, key=lambda name: peers[name]["median"])
    ours = engines[OURS]["output_tok_s"]
    return {
        "peer": best,
        "output_tok_s": ours["median"] / peers[best]["median"],
        "worst_case": ours["min"] / peers[best]["max"],
    }


def render(report: dict[str, Any], workload: Workload) -> str:
    width = max(len(name) for name in report["engines"])
    lines = ["", f"{'':{width}}  output tok/s (min..max)     total tok/s   bandwidth  FLOPs  of the bound"]
    for name, s in report["engines"].items():
        o, shares = s["output_tok_s"], s["shares"]
        lines.append(
            f"{name:{width}}  {o['median']:9.1f} ({o['min']:.1f}..{o['max']:.1f})".ljust(width + 29)
            + f" {s['total_tok_s']['median']:11.1f}  {shares['bandwidth']:9.0%}  {shares['flops']:5.0%}"
            + f"  {shares['bound']:11.0%}"
        )
    c, best = report["ceiling"], report["least_work"]["best_seconds"]
    lines.append(
        f"limits measured here: read {c['read_gb_s']:.1f} GB/s, matrix product {c['gemm_gflop_s']:,.0f} GFLOP/s; "
        f"they bound this workload at {workload.num_output_tokens / best:,.0f} output tok/s"
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
            f"ratio: {r['output_tok_s']:.2f}x {r['peer']}, the faster peer (our slowest round over its fastest: "
            f"{r['worst_case']:.2f}x)"
        )
    busy = [x for s in report["engines"].values() for x in s["other_load"] if x is not None]
    if busy and max(busy) > 0.3:
        lines.append(f"other programs used up to {max(busy):.1f} cores: repeat on an idle machine")
    return "\n".join(lines)


def _peers(args: argparse.Namespace, llm: Any, workload: Workload) -> dict[str, Runner]:
    from megatron_infer.cli.bench_transformers import TransformersPeer
    from megatron_infer.model_loader.sources import open_source

    note("loading transformers ...")
    peer = TransformersPeer(Path(open_source(args.model).path), dtype=llm.engine.shape.dtype, device=_device(llm))
    if "continuous" not in peer.variants:
        note("transformers' continuous batching has no recurrent states: only its generate is measured")
    peer.choose_attention(workload)
    return {f"transformers {name}": _peer_runner(peer, name, workload) for name in peer.variants}


def _peer_runner(peer: Any, variant: str, workload: Workload) -> Runner:
    return lambda: peer.run(variant, workload)


def _fresh(workload: Workload, llm: Any) -> Workload:
    """The workload, with an empty prefix cache, so that hits come from the same round only."""
    llm.engine.reset_prefix_cache()
    return workload


def _head(workload: Workload) -> Workload:
    """A few short requests, at the full batch size, to warm up every path."""
    count = workload.concurrency
    return Workload(
        prompts=workload.prompts[:count],
        output_lens=[min(n, 8) for n in workload.output_lens[:count]],
        concurrency=count,
    )


def _plain_ids(llm: Any) -> list[int]:
    tokenizer = llm.tokenizer
    special = set() if tokenizer is None else tokenizer.special_ids | set(tokenizer.eos_ids)
    return [i for i in range(llm.engine.shape.vocab_size) if i not in special]


def _decode_rate(result: RunResult) -> float | None:
    if result.token_times is None:
        return None
    gaps = sum(len(times) - 1 for times in result.token_times)
    seconds = sum(times[-1] - times[0] for times in result.token_times)
    return gaps / seconds if seconds > 0 else None


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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

    import megatron_infer

    return {
        "megatron_infer": megatron_infer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _settings(args: argparse.Namespace, device: str) -> dict[str, Any]:
    import torch

    names = ("num_requests", "input_len", "output_len", "concurrency", "shared_prefix", "workload_seed", "rounds")
    return {
        **{name: getattr(args, name) for name in names},
        "device": device,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _open_report(path: str | None) -> Path | None:
    """The report's path. Raises InferenceError at the start if it cannot be written."""
    if path is None:
        return None
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from error
