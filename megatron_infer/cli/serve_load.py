"""Load on an OpenAI-compatible server: calls sent at their times or so many at once, and when each token came back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to send."""

    path: str
    body: dict[str, Any]
    at: float | None = None
    """Seconds after the load began (open loop); None: as soon as there is room."""
    leave_after: float | None = None
    """Seconds after which the client goes away, as one did that is replayed."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of a call. Times in seconds since the load began."""

    sent: float
    ended: float = 0.0
    code: str = ""
    """ "200", another status, or what went wrong: connect, timeout, broken, in_stream; "left": as asked."""
    message: str = ""
    token_times: list[float] = field(default_factory=list)
    """When each piece of a stream came that bears text or tokens."""
    num_prompt: int = 0
    num_output: int = 0
    """As the server says (usage), else pieces."""
    late: float = 0.0
    """Seconds it was sent after its time."""

    @property
    def is_complete(self) -> bool:
        return self.code == "200"


@dataclass(slots=True, kw_only=True)
class Load:
    """Everything that came of one run."""

    seconds: float
    answers: list[Answer]


def run_load(
    url: str, calls: Sequence[Call], *, concurrency: int | None, key: str | None = None, timeout_s: float = 600.0
) -> Load:
    """Send `calls`: at their times, or `concurrency` at once. A call that fails is an answer, never an exception."""
    return asyncio.run(_run(url, calls, concurrency, key, timeout_s))


async def _run(url: str, calls: Sequence[Call], concurrency: int | None, key: str | None, timeout_s: float) -> Load:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency or 256)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits) as client:
        sender = _Sender(client)
        if concurrency is None:
            tasks = [asyncio.create_task(sender.send_at(call)) for call in calls]
        else:
            waiting = iter(enumerate(calls))
            found: dict[int, Answer] = {}

            async def work() -> None:
                for place, call in waiting:
                    found[place] = await sender.send(call)

            await asyncio.gather(*(work() for _ in range(concurrency)))
            return Load(seconds=sender.now(), answers=[found[place] for place in range(len(calls))])
        answers = await asyncio.gather(*tasks)
    return Load(seconds=max((one.ended for one in answers), default=0.0), answers=list(answers))


class _Sender:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    async def send_at(self, call: Call) -> Answer:
        due = call.at or 0.0
        await asyncio.sleep(max(0.0, due - self.now()))
        answer = await self.send(call)
        answer.late = max(0.0, answer.sent - due)
        return answer

    async def send(self, call: Call) -> Answer:
        answer = Answer(sent=self.now())
        try:
            async with asyncio.timeout(call.leave_after):
                await self._send(call, answer)
        except TimeoutError:
            answer.code = "left"
        except httpx.TimeoutException as error:
            answer.code, answer.message = "timeout", str(error)
        except httpx.ConnectError as error:
            answer.code, answer.message = "connect", str(error)
        except (httpx.HTTPError, ValueError) as error:
            answer.code, answer.message = "broken", f"{type(error).__name__}: {error}"
        answer.ended = self.now()
        return answer

    async def _send(self, call: Call, answer: Answer) -> None:
        streams = bool(call.body.get("stream"))
        async with self._client.stream("POST", call.path, json=call.body) as reply:
            if reply.status_code != 200 or not streams:
                data = await reply.aread()
                answer.code = str(reply.status_code)
                if reply.status_code == 200:
                    _take_usage(answer, json.loads(data))
                else:
                    answer.message = data[:300].decode(errors="replace")
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    answer.code = answer.code or "200"
                    return
                self._take_event(answer, json.loads(data))
            answer.code, answer.message = answer.code or "broken", answer.message or "the stream ended without [DONE]"

    def _take_event(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            answer.code, answer.message = "in_stream", json.dumps(event["error"])[:300]
            return
        if any(_bears(choice) for choice in event.get("choices", ())):
            answer.token_times.append(self.now())
            answer.num_output += 1
        _take_usage(answer, event)


def _bears(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    shown = (choice.get("text"), choice.get("token_ids"), *(value for name, value in delta.items() if name != "role"))
    return any(shown)


def _take_usage(answer: Answer, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
