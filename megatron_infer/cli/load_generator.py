"""Generates load on an OpenAI-compatible server, open or closed loop, and measures when each token comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCall:
    path: str
    body: dict[str, Any]
    at: float | None = None
    """Seconds after the start (open loop); None: when a connection is free (closed loop)."""
    leave_after: float | None = None
    """Seconds after which the client disconnects, as the recorded one did."""


@dataclass(slots=True, kw_only=True)
class CallResult:
    """The result of a call. Times are in seconds since the start."""

    sent: float
    ended: float = 0.0
    code: str = ""
    """ "200", another status, or an error: connect, timeout, broken, in_stream; "left": after `leave_after`."""
    message: str = ""
    token_times: list[float] = field(default_factory=list)
    """Times of the chunks of a stream with text or tokens."""
    num_prompt: int = 0
    num_output: int = 0
    """Tokens by the server's `usage`, else chunks."""
    late: float = 0.0
    """Seconds between its due time and its sending."""

    @property
    def is_complete(self) -> bool:
        return self.code == "200"


@dataclass(slots=True, kw_only=True)
class LoadResult:
    seconds: float
    results: list[CallResult]


def run_load(
    url: str, calls: Sequence[LoadCall], *, concurrency: int | None, key: str | None = None, timeout_s: float = 600.0
) -> LoadResult:
    """Send `calls` at their times, or `concurrency` at once. A call that fails is a result, not an exception."""
    return asyncio.run(_run(url, calls, concurrency, key, timeout_s))


async def _run(
    url: str, calls: Sequence[LoadCall], concurrency: int | None, key: str | None, timeout_s: float
) -> LoadResult:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency or 256)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits) as client:
        sender = _Sender(client)
        if concurrency is None:
            tasks = [asyncio.create_task(sender.send_at(call)) for call in calls]
        else:
            waiting = iter(enumerate(calls))
            found: dict[int, CallResult] = {}

            async def work() -> None:
                for place, call in waiting:
                    found[place] = await sender.send(call)

            await asyncio.gather(*(work() for _ in range(concurrency)))
            return LoadResult(seconds=sender.now(), results=[found[place] for place in range(len(calls))])
        results = await asyncio.gather(*tasks)
    return LoadResult(seconds=max((one.ended for one in results), default=0.0), results=list(results))


class _Sender:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    async def send_at(self, call: LoadCall) -> CallResult:
        due = call.at or 0.0
        await asyncio.sleep(max(0.0, due - self.now()))
        result = await self.send(call)
        result.late = max(0.0, result.sent - due)
        return result

    async def send(self, call: LoadCall) -> CallResult:
        result = CallResult(sent=self.now())
        try:
            async with asyncio.timeout(call.leave_after):
                await self._send(call, result)
        except TimeoutError:
            result.code = "left"
        except httpx.TimeoutException as error:
            result.code, result.message = "timeout", str(error)
        except httpx.ConnectError as error:
            result.code, result.message = "connect", str(error)
        except (httpx.HTTPError, ValueError) as error:
            result.code, result.message = "broken", f"{type(error).__name__}: {error}"
        result.ended = self.now()
        return result

    async def _send(self, call: LoadCall, result: CallResult) -> None:
        streams = bool(call.body.get("stream"))
        async with self._client.stream("POST", call.path, json=call.body) as reply:
            if reply.status_code != 200 or not streams:
                data = await reply.aread()
                result.code = str(reply.status_code)
                if reply.status_code == 200:
                    _take_usage(result, json.loads(data))
                else:
                    result.message = data[:300].decode(errors="replace")
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data:"):
                    continue
                event = line[5:].strip()
                if event == "[DONE]":
                    result.code = result.code or "200"
                    return
                self._take_event(result, json.loads(event))
            result.code, result.message = result.code or "broken", result.message or "the stream ended without [DONE]"

    def _take_event(self, result: CallResult, event: dict[str, Any]) -> None:
        if "error" in event:
            result.code, result.message = "in_stream", json.dumps(event["error"])[:300]
            return
        if any(_has_content(choice) for choice in event.get("choices", ())):
            result.token_times.append(self.now())
            result.num_output += 1
        _take_usage(result, event)


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    shown = (choice.get("text"), choice.get("token_ids"), *(value for name, value in delta.items() if name != "role"))
    return any(shown)


def _take_usage(result: CallResult, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        result.num_prompt, result.num_output = usage["prompt_tokens"], usage["completion_tokens"]
