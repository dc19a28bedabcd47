"""`megatron-infer bench-serve URL`: the commands of load tools for a server, or the calls that it recorded once more.

guidellm and `vllm bench serve` make load. They replay times, lengths or messages of a trace, but no whole bodies, and
neither disconnects as a client did: `--replay` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.bench import RunResult, distribution, latency_summary, open_report
from megatron_infer.cli.config_flags import flag_of
from megatron_infer.cli.loading import positive_int
from megatron_infer.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    import httpx

ENDPOINTS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}
"""vLLM's name of a backend, and the path."""
TIMEOUT_S = 600.0
LOAD: Mapping[str, Any] = {
    "endpoint": "completions",
    "tokenizer": "DIRECTORY",
    "num_requests": 64,
    "concurrency": 16,
    "rate": None,
    "input_len": 128,
    "output_len": 64,
}
"""Options of the printed commands, with their defaults. A replay takes none of them."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench-serve",
        help="commands that load a server; replay of recorded calls",
        description="Prints the commands of guidellm and `vllm bench serve` that load the server at URL. With --replay "
        "sends the calls that `serve --record` wrote, at their times, and reports latencies and errors by code.",
    )
    parser.add_argument("url", metavar="URL", help="URL of the server: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="default: MEGATRON_INFER_API_KEY of the environment")
    parser.add_argument("--model", metavar="NAME", help="name in requests (default: the first that the server has)")
    load = parser.add_argument_group("load", "options of the printed commands", argument_default=argparse.SUPPRESS)
    load.add_argument("--endpoint", choices=sorted(ENDPOINTS), help=f"default {LOAD['endpoint']}")
    load.add_argument("--tokenizer", metavar="DIRECTORY", help="directory of the model's tokenizer")
    load.add_argument("--num-requests", type=positive_int, metavar="N", help=f"default {LOAD['num_requests']}")
    how = load.add_mutually_exclusive_group()
    closed = f"closed loop: requests at once (default {LOAD['concurrency']})"
    how.add_argument("--concurrency", type=positive_int, metavar="N", help=closed)
    how.add_argument("--rate", type=_positive, metavar="R", help="open loop: requests a second, Poisson")
    load.add_argument(
        "--input-len", type=positive_int, metavar="N", help=f"prompt tokens (default {LOAD['input_len']})"
    )
    load.add_argument(
        "--output-len", type=positive_int, metavar="N", help=f"answer tokens (default {LOAD['output_len']})"
    )
    replay = parser.add_argument_group("replay")
    replay.add_argument("--replay", metavar="FILE", help="calls recorded by serve --record")
    replay.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="factor on the speed of --replay")
    replay.add_argument("--json", metavar="FILE", help="write the report of --replay")
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """-> 0; 1 if a replayed call failed. Raises InferenceError without a server."""
    if not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"URL is {args.url!r}; give it as http://HOST:PORT")
    key = args.api_key or os.environ.get("MEGATRON_INFER_API_KEY")
    if args.replay is None:
        if args.json is not None or args.speed != 1.0:
            raise ConfigError("--json and --speed are of --replay FILE; the tools below write reports of their own")
        load = argparse.Namespace(**LOAD | vars(args))
        print(page(load, args.model or served_model(args.url, key), needs_key=key is not None))
        return 0
    if load_given := [flag_of(name) for name in LOAD if hasattr(args, name)]:
        raise ConfigError(f"{', '.join(load_given)}: of the printed commands; --replay sends the calls as recorded")
    calls, path = recorded_calls(args.replay, speed=args.speed, model=args.model), open_report(args.json)
    served_model(args.url, key)
    report = {"url": args.url, **summarize(replay(args.url, calls, key=key))}
    print(render(report))
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(bool(set(report["codes"]) - {"200", "left"}))


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def served_model(url: str, key: str | None) -> str:
    """The name of the first model. Raises InferenceError if the server does not answer, or has no model."""
    import httpx

    try:
        reply = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_headers(key), timeout=30.0)
        if reply.status_code != 200:
            raise InferenceError(f"{url}/v1/models answers {reply.status_code}: {reply.text[:200]}")
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise InferenceError(f"no server at {url}: {error or type(error).__name__}") from None


# ---------------------------------------------------------------------- commands of load tools


def guidellm_options(args: argparse.Namespace) -> dict[str, str]:
    """Of `guidellm run`."""
    _, path = ENDPOINTS[args.endpoint]
    is_closed = args.rate is None
    return {
        "--backend": f"kind=openai_http,target={args.url},request_format={path}",
        "--profile": f"kind=concurrent,streams={args.concurrency}" if is_closed else f"kind=poisson,rate={args.rate:g}",
        "--constraint": f"kind=max_requests,count={args.num_requests}",
        "--tokenizer": f"kind=hf_auto,model={args.tokenizer}",
        "--data": f"kind=synthetic_text,prompt_tokens={args.input_len},output_tokens={args.output_len}",
    }


def vllm_options(args: argparse.Namespace, model: str) -> dict[str, str]:
    """Of `vllm bench serve --ignore-eos`."""
    backend, path = ENDPOINTS[args.endpoint]
    return {
        "--backend": backend,
        "--base-url": args.url,
        "--endpoint": path,
        "--model": model,
        "--tokenizer": args.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": str(args.input_len),
        "--random-output-len": str(args.output_len),
        "--num-prompts": str(args.num_requests),
        **({"--max-concurrency": str(args.concurrency)} if args.rate is None else {"--request-rate": f"{args.rate:g}"}),
    }


def page(args: argparse.Namespace, model: str, *, needs_key: bool) -> str:
    """The commands, and what they need."""

    def command(words: str, options: Mapping[str, str]) -> str:
        return f"{words} {shlex.join(word for pair in options.items() for word in pair)}"

    lines = [
        command("guidellm run", guidellm_options(args)),
        command("vllm bench serve --ignore-eos", vllm_options(args, model)),
        "",
        f"{args.tokenizer} has the tokenizer of {model}: megatron-infer convert MODEL {args.tokenizer}",
        "Each in an environment with its package: pip install guidellm; pip install vllm",
    ]
    if needs_key:
        lines.append("The server's key: export OPENAI_API_KEY=KEY for vLLM; add ,api_key=KEY to guidellm's --backend")
    return "\n".join(lines)


# ---------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    path: str
    body: dict[str, Any]
    at: float
    """Seconds after the first call."""
    leave_after: float | None
    """Seconds after which the client disconnects, as the recorded one did; None: it stays."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a call. Times are in seconds since the start."""

    sent: float
    late: float
    """Seconds between its due time and its sending."""
    ended: float = 0.0
    code: str = ""
    """ "200", another status, or connect, timeout, broken, in_stream; "left": after `leave_after`."""
    message: str = ""
    token_times: list[float] = field(default_factory=list)
    """Times of the pieces of a stream with text or tokens."""
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def num_output(self) -> int:
        """Tokens by the server's `usage`, else pieces."""
        return self.usage.get("completion_tokens", len(self.token_times))


def recorded_calls(path: str, *, speed: float, model: str | None) -> list[RecordedCall]:
    """The calls of a file in the order of their times. Raises ConfigError that names the line.

    model: name in their place of the recorded one.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # a line may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay {path}: {error}") from None
    calls, changed = [], {} if model is None else {"model": model}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            leave_after = None if line["complete"] else line["seconds"]
            body, at = line["body"] | changed, line["at"] / speed
            calls.append(RecordedCall(path=line["path"], body=body, at=at, leave_after=leave_after))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--replay {path}, line {number}: not what serve --record writes: {error!r}") from None
    if not calls:
        raise ConfigError(f"--replay {path} has no lines")
    return sorted(calls, key=lambda call: call.at)


def replay(url: str, calls: Sequence[RecordedCall], *, key: str | None = None) -> list[Answer]:
    """Send the calls at their times. A call that fails is an answer, not an exception."""
    return asyncio.run(_replay(url, calls, key))


async def _replay(url: str, calls: Sequence[RecordedCall], key: str | None) -> list[Answer]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    began, first = time.perf_counter(), calls[0].at

    def now() -> float:
        return time.perf_counter() - began

    async def send(call: RecordedCall) -> Answer:
        due = call.at - first
        await asyncio.sleep(max(0.0, due - now()))
        answer = Answer(sent=now(), late=max(0.0, now() - due))
        try:
            async with (
                asyncio.timeout(call.leave_after),
                client.stream("POST", call.path, json=call.body) as reply,
            ):
                await _read(reply, answer, now)
        except TimeoutError:
            answer.code = "left"
        except httpx.TimeoutException as error:
            answer.code, answer.message = "timeout", str(error)
        except httpx.ConnectError as error:
            answer.code, answer.message = "connect", str(error)
        except (httpx.HTTPError, ValueError) as error:
            answer.code, answer.message = "broken", f"{type(error).__name__}: {error}"
        answer.ended = now()
        return answer

    async with httpx.AsyncClient(base_url=url, headers=_headers(key), timeout=TIMEOUT_S, limits=limits) as client:
        return await asyncio.gather(*(send(call) for call in calls))


async def _read(reply: httpx.Response, answer: Answer, now: Any) -> None:
    if reply.status_code != 200 or "event-stream" not in reply.headers.get("content-type", ""):
        data = await reply.aread()
        answer.code = str(reply.status_code)
        if reply.status_code == 200:
            answer.usage = json.loads(data).get("usage") or {}
        else:
            answer.message = data[:300].decode(errors="replace")
        return
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            answer.code = answer.code or "200"
            return
        if not line.startswith("data:"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            answer.code, answer.message = "in_stream", json.dumps(event["error"])[:300]
        if any(_has_content(choice) for choice in event.get("choices", ())):
            answer.token_times.append(now())
        answer.usage = event.get("usage") or answer.usage
    if not answer.code:
        answer.code, answer.message = "broken", "the stream ended without [DONE]"


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    shown = (choice.get("text"), choice.get("token_ids"), *(value for name, value in delta.items() if name != "role"))
    return any(shown)


def summarize(answers: Sequence[Answer]) -> dict[str, Any]:
    """Milliseconds of completed calls; rates over all of them."""
    seconds = max(max(one.ended for one in answers), 1e-9)
    complete = [one for one in answers if one.code == "200"]
    streamed = [one for one in complete if one.token_times]
    times = RunResult(
        seconds=seconds, arrivals=[one.sent for one in streamed], token_times=[one.token_times for one in streamed]
    )
    # a piece of a stream may hold several tokens
    several = [one for one in streamed if one.num_output > 1]
    tpot = [1e3 * (one.token_times[-1] - one.token_times[0]) / (one.num_output - 1) for one in several]
    latency = latency_summary(times) | ({"tpot_ms": distribution(tpot)} if tpot else {})
    whole = [1e3 * (one.ended - one.sent) for one in complete]
    num_output = sum(one.num_output for one in answers)
    return {
        "num_requests": len(answers),
        "seconds": seconds,
        "codes": dict(sorted(Counter(one.code for one in answers).items())),
        "messages": {one.code: one.message for one in reversed(answers) if one.message},
        "prompt_tokens": sum(one.usage.get("prompt_tokens", 0) for one in answers),
        "output_tokens": num_output,
        "requests_per_s": len(complete) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "latest_s": max(one.late for one in answers),
        "latency": latency | ({"e2e_ms": distribution(whole)} if whole else {}),
    }


def render(report: dict[str, Any]) -> str:
    codes = ", ".join(f"{code}: {count}" for code, count in report["codes"].items())
    lines = [
        f"{report['url']}: {report['num_requests']} requests, {report['seconds']:.2f} s",
        f"answers by code        {codes}",
        f"tokens                 {report['prompt_tokens']:,} prompt, {report['output_tokens']:,} output",
        f"throughput             {report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:,.1f} output tokens/s",
    ]
    names = {"ttft_ms": "first token", "itl_ms": "between", "tpot_ms": "per token", "e2e_ms": "whole"}
    for name, values in report["latency"].items():
        lines.append(f"{names[name]:<12} ms  " + "  ".join(f"{key} {value:,.1f}" for key, value in values.items()))
    if report["latest_s"] > 0.1:
        lines.append(f"this client fell behind by up to {report['latest_s']:.2f} s: the figures show its own limits")
    lines += [f"{code}: {message}" for code, message in report["messages"].items()]
    return "\n".join(lines)
