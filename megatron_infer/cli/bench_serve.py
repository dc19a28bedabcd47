"""`megatron-infer bench-serve URL`: load test of a server, open or closed loop, generated or replayed."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.bench_workload import Workload, make_workload, parse_range, percentile, run_engine
from megatron_infer.cli.loading import note, positive_int, whole_number
from megatron_infer.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron_infer.cli.load_generator import LoadCall, LoadResult

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SHAREGPT_PROMPT, SHAREGPT_ANSWER = (4.3, 1.3, 4, 1024), (5.1, 0.9, 4, 1024)
"""Mean and deviation of the log of a length in tokens, and its bounds: about those of ShareGPT's conversations."""
WORDS = "time year people way day man thing woman life child world school state family student group country".split()


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench-serve",
        help="load test of a server: latencies, throughput, errors",
        description="Sends streaming requests to an OpenAI-compatible server and reports percentiles of time to first "
        "token, time between chunks and whole requests, tokens per second, and errors by code. With --rate, requests "
        "are sent at random times (open loop); else --concurrency requests run at once (closed loop).",
    )
    parser.add_argument("url", metavar="URL", help="URL of the server: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="default: MEGATRON_INFER_API_KEY of the environment")
    parser.add_argument("--model", metavar="NAME", help="name in requests (default: the first that the server has)")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--num-requests", type=positive_int, default=64, metavar="N")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=positive_int, default=16, metavar="N", help="closed loop: requests at once")
    loop.add_argument("--rate", type=_rate, metavar="R", help="open loop: requests a second, Poisson")
    work = parser.add_argument_group("workload")
    work.add_argument("--input-len", type=parse_range, default=(64, 256), metavar="LOW:HIGH", help="prompt tokens")
    work.add_argument("--output-len", type=parse_range, default=(64, 128), metavar="LOW:HIGH", help="answer tokens")
    work.add_argument("--sharegpt", action="store_true", help="lengths like those of ShareGPT's conversations instead")
    work.add_argument(
        "--shared-prefix", type=whole_number, default=0, metavar="N", help="leading tokens common to all prompts"
    )
    work.add_argument("--token-range", type=parse_range, default=(100, 1000), metavar="LOW:HIGH", help="ids of prompts")
    work.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSONL of {"prompt": ...} or {"messages": ...}, with further fields of the body',
    )
    work.add_argument("--replay", metavar="FILE", help="calls recorded by serve --record, at their times")
    work.add_argument("--speed", type=_rate, default=1.0, metavar="X", help="factor on the speed of --replay")
    work.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="do not send ignore_eos, for servers without it; answers may end early",
    )
    work.add_argument("--workload-seed", type=int, default=0, metavar="S")
    parser.add_argument("--rounds", type=positive_int, default=1, metavar="N", help="the median round is reported")
    parser.add_argument("--timeout", type=_rate, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--compare-offline",
        metavar="MODEL",
        help="also run the workload on an engine in this process, to measure the overhead of HTTP",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", metavar="FILE", help="plot latencies and throughput as PNG; needs matplotlib")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0 if every call was answered, 1 if some failed. Raises InferenceError without a server."""
    if args.plot is not None:
        require_matplotlib()
    _check(args)
    from megatron_infer.cli.load_generator import run_load

    key = args.api_key or os.environ.get("MEGATRON_INFER_API_KEY")
    model = _model_of(args, key)
    calls, workload = calls_of(args, model)
    closed = args.rate is None and args.replay is None
    concurrency = min(args.concurrency, len(calls)) if closed else None
    offline = None if args.compare_offline is None else _Offline(args.compare_offline, workload)
    loads: list[LoadResult] = []
    rates: list[float] = []
    for number in range(args.rounds):
        if args.rounds > 1:
            note(f"round {number + 1} of {args.rounds} ...")
        loads.append(run_load(args.url, calls, concurrency=concurrency, key=key, timeout_s=args.timeout))
        if offline is not None:
            rates.append(offline.rate())
    summaries = [summarize(load) for load in loads]
    middle = sorted(range(args.rounds), key=lambda i: summaries[i]["output_tokens_per_s"])[args.rounds // 2]
    how = f"{concurrency} at once" if closed else f"{args.rate:g}/s" if args.rate is not None else "as recorded"
    report = {
        "url": args.url,
        "model": model,
        "endpoint": args.endpoint,
        "load": how,
        **summaries[middle],
        "rounds": [one["output_tokens_per_s"] for one in summaries],
    }
    if offline is not None:
        through = statistics.median(one["output_tokens_per_s"] for one in summaries)
        offline_rate = statistics.median(rates)
        report["offline"] = {
            "output_tokens_per_s": offline_rate,
            "share": through / offline_rate,
            "rounds": rates,
            "other_load": offline.other_load,
        }
    print(render(report))
    if args.json is not None:
        _write(args.json, json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        plot(loads[middle], report, args.plot)
    return 1 if set(report["codes"]) - {"200", "left"} else 0


def _check(args: argparse.Namespace) -> None:
    if not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"URL is {args.url!r}; give it as http://HOST:PORT")
    if args.prompts is not None and args.replay is not None:
        raise ConfigError("--prompts and --replay exclude each other")
    if args.compare_offline is not None and (
        args.rate is not None or args.replay or args.prompts or args.endpoint != "completions"
    ):
        raise ConfigError("--compare-offline needs generated prompts, at /v1/completions, --concurrency at once")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")


def _model_of(args: argparse.Namespace, key: str | None) -> str:
    """The model's name. Raises InferenceError if the server does not answer, or has no model."""
    import httpx

    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        reply = httpx.get(f"{args.url.rstrip('/')}/v1/models", headers=headers, timeout=30.0)
        if reply.status_code != 200:
            raise InferenceError(f"{args.url}/v1/models answers {reply.status_code}: {reply.text[:200]}")
        names = [one["id"] for one in reply.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise InferenceError(f"no server at {args.url}: {error or type(error).__name__}") from None
    return args.model or str(names[0])


# ---------------------------------------------------------------------- workload


def calls_of(args: argparse.Namespace, model: str) -> tuple[list[LoadCall], Workload]:
    """The calls to send; and the generated workload, to run on an engine here."""
    from megatron_infer.cli.load_generator import LoadCall

    draw = random.Random(args.workload_seed)
    workload = _workload(args)
    if args.replay is not None:
        return list(_recorded(args)), workload
    if args.prompts is not None:
        bodies = _given_bodies(args, draw)
    elif args.endpoint == "chat":
        bodies = [
            {"messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=len(ids)))}], "max_tokens": count}
            for ids, count in zip(workload.prompts, workload.output_lens, strict=True)
        ]
    else:
        bodies = [
            {"prompt": ids, "max_tokens": count}
            for ids, count in zip(workload.prompts, workload.output_lens, strict=True)
        ]
    common = {"model": model, "stream": True, "temperature": 0.0, "stream_options": {"include_usage": True}}
    if not args.no_ignore_eos:
        common["ignore_eos"] = True
    at, calls = 0.0, []
    for body in bodies:
        if args.rate is not None:
            at += draw.expovariate(args.rate)
        path = PATHS["chat" if "messages" in body else "completions"]
        calls.append(LoadCall(path=path, body={**common, **body}, at=None if args.rate is None else at))
    return calls, workload


def _workload(args: argparse.Namespace) -> Workload:
    low, high = args.token_range
    common = {"concurrency": args.concurrency, "token_ids": range(low, high + 1), "seed": args.workload_seed}
    if not args.sharegpt:
        return make_workload(
            num_requests=args.num_requests,
            input_len=args.input_len,
            output_len=args.output_len,
            shared_prefix=args.shared_prefix,
            **common,
        )
    draw = random.Random(args.workload_seed)
    prefix = draw.choices(range(low, high + 1), k=args.shared_prefix)
    lengths = [(_length(draw, SHAREGPT_PROMPT), _length(draw, SHAREGPT_ANSWER)) for _ in range(args.num_requests)]
    return Workload(
        prompts=[prefix + draw.choices(range(low, high + 1), k=size) for size, _ in lengths],
        output_lens=[size for _, size in lengths],
        concurrency=args.concurrency,
    )


def _length(draw: random.Random, shape: tuple[float, float, int, int]) -> int:
    mean, deviation, low, high = shape
    return min(high, max(low, round(draw.lognormvariate(mean, deviation))))


def _lines(flag: str, path: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file. Raises ConfigError naming the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{flag} {path}, line {number}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{flag} {path}, line {number}: expected an object, got a {type(value).__name__}")
        found.append((number, value))
    if not found:
        raise ConfigError(f"{flag} {path} has no lines")
    return found


def _given_bodies(args: argparse.Namespace, draw: random.Random) -> list[dict[str, Any]]:
    """--num-requests bodies, starting over where the file is shorter."""
    lines = _lines("--prompts", args.prompts)
    for number, body in lines:
        if ("prompt" in body) == ("messages" in body):
            raise ConfigError(f"--prompts {args.prompts}, line {number}: give either prompt or messages")
    chosen = [lines[i % len(lines)][1] for i in range(args.num_requests)]
    return [{"max_tokens": draw.randint(*args.output_len), **body} for body in chosen]


def _recorded(args: argparse.Namespace) -> Iterator[LoadCall]:
    from megatron_infer.cli.load_generator import LoadCall

    lines = _lines("--replay", args.replay)
    try:
        first = min(line["at"] for _, line in lines)
        for _, line in sorted(lines, key=lambda item: item[1]["at"]):
            body = {**line["body"], **({} if args.model is None else {"model": args.model})}
            yield LoadCall(
                path=line["path"],
                body=body,
                at=(line["at"] - first) / args.speed,
                leave_after=None if line["complete"] else line["seconds"],
            )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--replay {args.replay}: not what serve --record writes ({error} is missing)") from None


class _Offline:
    """Runs the workload on an engine in this process."""

    def __init__(self, name: str, workload: Workload) -> None:
        from megatron_infer.config.sampling_params import SamplingParams
        from megatron_infer.engine.llm import LLM

        note(f"loading {name} ...")
        self._engine, self._run, self._params = LLM(name).engine, run_engine, SamplingParams
        self._workload = workload
        self.other_load = 0.0
        """Most cores that other processes used meanwhile."""

    def rate(self) -> float:
        """Output tokens per second."""
        self._engine.reset_prefix_cache()
        result = self._run(self._engine, self._params, self._workload)
        self.other_load = max(self.other_load, result.other_load or 0.0)
        return sum(map(len, result.outputs)) / result.seconds


# ---------------------------------------------------------------------- report


def summarize(load: LoadResult) -> dict[str, Any]:
    """Percentiles in ms over completed calls; rates over all results."""
    complete = [one for one in load.results if one.is_complete]
    series: dict[str, list[float]] = {"ttft_ms": [], "itl_ms": [], "tpot_ms": [], "e2e_ms": []}
    for one in complete:
        series["e2e_ms"].append(1e3 * (one.ended - one.sent))
        if not one.token_times:
            continue
        series["ttft_ms"].append(1e3 * (one.token_times[0] - one.sent))
        series["itl_ms"] += [1e3 * (b - a) for a, b in pairwise(one.token_times)]
        if one.num_output > 1:
            series["tpot_ms"].append(1e3 * (one.token_times[-1] - one.token_times[0]) / (one.num_output - 1))
    num_output = sum(one.num_output for one in load.results)
    seconds = max(load.seconds, 1e-9)
    messages = {one.code: one.message for one in reversed(load.results) if one.message}
    return {
        "num_requests": len(load.results),
        "seconds": load.seconds,
        "codes": dict(sorted(Counter(one.code for one in load.results).items())),
        "messages": messages,
        "prompt_tokens": sum(one.num_prompt for one in load.results),
        "output_tokens": num_output,
        "requests_per_s": len(complete) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "latest_s": max((one.late for one in load.results), default=0.0),
        "latency": {name: _spread(values) for name, values in series.items() if values},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        **{f"p{p}": percentile(values, p) for p in (50, 90, 99)},
        "max": max(values),
    }


def render(report: dict[str, Any]) -> str:
    codes = ", ".join(f"{code}: {count}" for code, count in report["codes"].items())
    lines = [
        f"{report['url']}, {report['model']}: {report['num_requests']} requests, {report['load']}, "
        f"{report['seconds']:.2f} s",
        f"answers by code        {codes}",
        f"tokens                 {report['prompt_tokens']:,} prompt, {report['output_tokens']:,} output",
        f"throughput             {report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:,.1f} output tokens/s",
    ]
    if report["latency"]:
        lines.append(f"{'ms':<12}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99", "max")))
        names = {"ttft_ms": "first token", "itl_ms": "between", "tpot_ms": "per token", "e2e_ms": "whole"}
        for name, values in report["latency"].items():
            lines.append(f"{names[name]:<12}" + "".join(f"{value:>11,.1f}" for value in values.values()))
    if report["latest_s"] > 0.1:
        lines.append(f"this client fell behind by up to {report['latest_s']:.2f} s: the figures show its own limits")
    if "offline" in report:
        offline = report["offline"]
        lines.append(
            f"without HTTP           {offline['output_tokens_per_s']:,.1f} output tokens/s; "
            f"the server reaches {100 * offline['share']:.1f} %"
        )
        if offline["other_load"] > 0.2:
            lines.append(
                f"other processes used {offline['other_load']:.1f} cores meanwhile: the figures are unreliable"
            )
    lines += [f"{code}: {message}" for code, message in report["messages"].items()]
    return "\n".join(lines)


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed; called before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def plot(load: LoadResult, report: dict[str, Any], path: str) -> None:
    """Write a PNG with three panels: latency distribution, gaps between chunks, tokens per second over time."""
    from matplotlib.figure import Figure

    complete = [one for one in load.results if one.is_complete]
    figure = Figure(figsize=(13, 4), layout="constrained")
    latencies, gaps, rates = figure.subplots(1, 3)
    for name, values in (
        ("first token", [one.token_times[0] - one.sent for one in complete if one.token_times]),
        ("whole request", [one.ended - one.sent for one in complete]),
    ):
        ordered = sorted(values)
        latencies.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    latencies.set(xlabel="seconds", ylabel="share of requests", title="Latency")
    latencies.legend()
    between = [1e3 * (b - a) for one in complete for a, b in zip(one.token_times, one.token_times[1:], strict=False)]
    gaps.hist(between, bins=60)
    gaps.set(xlabel="ms", ylabel="chunks", title="Between chunks")
    times = [moment for one in load.results for moment in one.token_times]
    width = max(load.seconds / 60, 1e-3)
    rates.hist(times, bins=60, weights=[1 / width] * len(times), histtype="step")
    rates.set(xlabel="seconds", ylabel="chunks per second", title="Throughput")
    figure.suptitle(f"{report['model']}, {report['load']}: {report['output_tokens_per_s']:,.0f} output tokens/s")
    save_figure(figure, path)


def save_figure(figure: Figure, path: str) -> None:
    """Raises InferenceError if the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from None


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value
