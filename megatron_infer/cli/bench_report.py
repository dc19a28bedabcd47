"""What a benchmark found: medians, shares of the machine's limits, and the table of workloads and engines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.bench_suspend import render_suspensions
from megatron_infer.cli.bench_workload import QUIET_CORES, RunResult, Workload, latency_summary
from megatron_infer.config.inference import WeightDtype
from megatron_infer.config.model_shape import KV_DTYPE_BYTES

if TYPE_CHECKING:
    from megatron_infer.config.step_work import Ceiling

OURS = "megatron_infer"
SUSPENDING = "megatron_infer, suspending"
OFF = "off"
"""This engine without speculation."""


def summarize_column(
    results: Mapping[str, list[RunResult]], workload: Workload, engine: Any, ceiling: Ceiling
) -> dict[str, Any]:
    """Everything about one workload: the engines, the work that has to be done, our rate beside the best peer's."""
    from megatron_infer.cli.bench_roofline import least_work  # imports torch

    shape = engine.shape
    config = engine.config
    kv_dtype_bytes = KV_DTYPE_BYTES[config.kv_dtype_of(shape)]
    weight_dtype = WeightDtype(config.weight_dtype).value
    work = least_work(shape, workload, kv_dtype_bytes=kv_dtype_bytes, weight_dtype=weight_dtype)
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
    """What was drafted and kept between two `SpecDecodeMetrics`, by place too. synthetic: the rate at which drafts were
    kept whatever was drawn."""
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


def render_table(report: Mapping[str, Any]) -> str:
    """Markdown: a row for each workload, a column for each engine, in tokens per second."""
    engines = {name: one for name, one in report["engines"].items() if name in _measured(report)}
    titles = [f"{name} {one['version']}" for name, one in engines.items()]
    lines = ["", f"| tok/s: median (min..max), share of the bound | {' | '.join(titles)} | beside the best |"]
    lines.append("|---" * (len(titles) + 2) + "|")
    for name, column in report["columns"].items():
        cells = []
        for engine in engines:
            found = column["engines"].get(engine)
            if found is None:
                cells.append("-")
                continue
            rate, bound = found["tok_s"], found["shares"]["bound"]
            cells.append(f"{rate['median']:,.0f} ({rate['min']:,.0f}..{rate['max']:,.0f}) {bound:.0%}")
        beside = "" if column["ratio"] is None else f"{column['ratio']['tok_s']:.2f}x {column['ratio']['peer']}"
        lines.append(f"| {_title(name, report['settings']['sizes'][name])} | {' | '.join(cells)} | {beside} |")
    starts = [f"{one['start_s']:.1f}; {one['rss_mib']:,.0f}" for one in engines.values()]
    lines.append(f"| start, s; resident memory, MiB | {' | '.join(starts)} | |")
    limits, settings = report["ceiling"], report["settings"]
    company = f", {settings['background_load']:g} of a core kept busy" if settings["background_load"] else ""
    lines += [
        "",
        f"{settings['cpu']}, {settings['threads']} threads, {report['shape']['dtype']}, {settings['rounds']} rounds"
        f"{company}; read {limits['read_gb_s']:.1f} GB/s, matrix product {limits['gemm_gflop_s']:,.0f} GFLOP/s",
    ]
    runs = [r for column in report["columns"].values() for one in column["engines"].values() for r in one["rounds"]]
    if loud := [r["other_load"] for r in runs if (r["other_load"] or 0.0) > QUIET_CORES]:
        lines.append(
            f"other programs used more than {QUIET_CORES} of a core in {len(loud)} of {len(runs)} runs, "
            f"at most {max(loud):.2f}: repeat on an idle machine"
        )
    return "\n".join(lines)


def _measured(report: Mapping[str, Any]) -> set[str]:
    return {name for column in report["columns"].values() for name in column["engines"]}


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


def _decode_rate(result: RunResult) -> float | None:
    if result.token_times is None:
        return None
    gaps = sum(len(times) - 1 for times in result.token_times)
    seconds = sum(times[-1] - times[0] for times in result.token_times)
    return gaps / seconds if seconds > 0 else None


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
