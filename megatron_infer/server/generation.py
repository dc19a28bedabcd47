"""The reply to a generation call: engine requests in; one JSON reply, or a stream of events, out.

The routes of each API turn a body into EngineRequests and a ReplyFormat; everything between is the same for all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.detokenize import INLINE_TOKENS
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import unavailable
from megatron_infer.server.inflight import EngineRequest

PIECE = 1000
"""Entries of a list that are encoded at once: with 20 alternatives each, some milliseconds."""


class ReplyFormat(Protocol):
    """How one API shows the outputs of one call. Outputs are cumulative."""

    def whole(self, outputs: list[RequestOutput]) -> Any:
        """The reply, of every request's last output in the order of the requests. Of a long one in a thread."""

    def first_events(self) -> Iterable[Any]:
        """Events of a stream before the first output."""

    def events(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """Events for a new output of request `index`."""

    def last_events(self) -> Iterable[Any]:
        """Events of a stream after the last output."""


async def generate(
    client: EngineClient,
    requests: Sequence[EngineRequest],
    reply: ReplyFormat,
    *,
    stream: bool | None,
    abort_ids: Iterable[str],
) -> Reply | Events:
    """Run the requests of a call. Raises what they are refused with, also for a stream that has not begun."""
    if stream:
        events = _events(client, requests, reply, abort_ids)
        await anext(events)  # a refusal still gets a status of its own
        return Events(events)
    async with client.submit(requests, abort_ids=abort_ids) as call:
        outputs = await call.results()
    if num_entries(outputs) <= INLINE_TOKENS:
        return Reply(reply.whole(outputs))
    return Reply(msgspec.Raw(await client.run_in_thread(_whole_as_json, reply, outputs)))


def num_entries(outputs: Iterable[RequestOutput]) -> int:
    """Tokens and log probabilities of prompts: what formatting a reply takes time for."""
    return sum(
        len(output.prompt_logprobs or ()) + sum(len(one.token_ids) for one in output.outputs) for output in outputs
    )


def _whole_as_json(reply: ReplyFormat, outputs: list[RequestOutput]) -> bytes:
    return msgspec.json.encode(in_pieces(reply.whole(outputs)))


def in_pieces(value: Any) -> Any:
    """The JSON value with long lists encoded, some entries at a time: between these calls other threads run."""
    if isinstance(value, dict):
        return {name: in_pieces(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= PIECE:
        return [in_pieces(one) if isinstance(one, dict) else one for one in value]
    pieces = (msgspec.json.encode(value[start : start + PIECE])[1:-1] for start in range(0, len(value), PIECE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def whole_outputs(
    client: EngineClient, requests: Sequence[EngineRequest], call: Call, *, field: str
) -> list[RequestOutput]:
    """The last outputs of a call's requests, checked first. field: the body's field with the prompts."""
    requests = client.checked(requests, call, field=field)
    async with client.submit(requests, abort_ids=(call.id,)) as inflight:
        return await inflight.results()


async def prompt_outputs(
    client: EngineClient, requests: Sequence[EngineRequest], call: Call, *, field: str
) -> list[RequestOutput]:
    """`whole_outputs` of requests for vectors or log probabilities of their prompts.

    Raises ApiError 503 where one was aborted before its prompt was computed.
    """
    outputs = await whole_outputs(client, requests, call, field=field)
    if any(one.finish_reason == "abort" for output in outputs for one in output.outputs):
        raise unavailable("a request was aborted before its prompt was computed; ask again", "aborted")
    return outputs


async def _events(
    client: EngineClient, requests: Sequence[EngineRequest], reply: ReplyFormat, abort_ids: Iterable[str]
) -> AsyncGenerator[Any]:
    """None once the requests are accepted, then the events."""
    async with client.submit(requests, stream=True, abort_ids=abort_ids) as call:
        updates = call.updates(client.settings.keep_alive_s)
        await anext(updates)
        yield None
        for event in reply.first_events():
            yield event
        async for outputs in updates:
            if not outputs:
                yield None
            for index, output in outputs.items():
                for event in reply.events(index, output):
                    yield event
    for event in reply.last_events():
        yield event
