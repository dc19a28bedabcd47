"""/v1/responses: OpenAI's newer API of a conversation, whole or as events. Nothing is stored.

A body becomes a chat body (`responses_input`), and is answered by the chat's own code; ResponsesReply shows the output
as items: reasoning, messages, function calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server import chat_completions
from megatron_infer.server.chat_completions import ChatCompletions, PreparedChat
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation import generate
from megatron_infer.server.http_errors import ApiError, of_validation
from megatron_infer.server.openai_logprobs import TokenTexts, chat_content
from megatron_infer.server.openai_protocol import ChatBody
from megatron_infer.server.reply_blocks import Block, BlockKind, BlockReader, Change
from megatron_infer.server.reply_fields import DeltaReader, usage_of
from megatron_infer.server.request_fields import ignore
from megatron_infer.server.responses_input import FIELDS, LOGPROBS, NAMES, ResponsesBody, chat_of, has_logprobs
from megatron_infer.server.routes import Routes
from megatron_infer.server.served_models import shown_name
from megatron_infer.server.server_config import ServerConfig


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    chat = ChatCompletions(routes, client, settings)
    texts = TokenTexts(client.tokenizer)

    async def reply(call: Call) -> Reply | Events:
        body: ResponsesBody = call.body
        if set(body.include or ()) - {LOGPROBS}:
            text = f"replies have all that there is; {LOGPROBS} acts"
            ignore(call.ignored, "include", text, strict=settings.strict_fields)
        prepared = await prepare_as_chat(chat, routes, chat_of(body), call, NAMES)
        shown = ResponsesReply(body, shown_name(client, body.model), prepared, texts)
        found = await generate(client, [prepared.request], shown, stream=body.stream, abort_ids=(shown.id, call.id))
        return Events(found.items, named=True) if isinstance(found, Events) else found

    routes.add(
        "POST",
        "/v1/responses",
        reply,
        "Answer a conversation (OpenAI's Responses API)",
        body=ResponsesBody,
        fields=FIELDS,
        media_types=("application/json", "text/event-stream"),
        statuses=(404, 429, 503, 504),
    )


async def prepare_as_chat(
    chat: ChatCompletions, routes: Routes, fields: dict[str, Any], call: Call, names: Mapping[str, str]
) -> PreparedChat:
    """A chat of another API, given as the fields of a chat's body.

    names: the caller's names of these fields, where they differ; errors and ignored fields have them.
    Raises ApiError 400.
    """
    kind = routes.fields.extend(chat_completions.ROUTE, ChatBody)
    try:
        body: Any = msgspec.convert(fields, kind)
        prepared = await chat.prepare(body, call)
    except msgspec.ValidationError as error:
        raise _with_names(of_validation(error, kind), names) from None
    except ApiError as error:
        raise _with_names(error, names) from None
    call.ignored[:] = [names.get(name, name) for name in call.ignored]
    return prepared


def _with_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    name = names.get(error.param or "")
    if name is not None:
        assert error.param is not None
        error.message, error.param = error.message.replace(error.param, name, 1), name
    return error


class ResponsesReply:
    """The ReplyFormat of one call. A whole reply is made as a stream's last event is."""

    def __init__(self, body: ResponsesBody, model: str, chat: PreparedChat, texts: TokenTexts) -> None:
        self._shows_cached = chat.shows_cached
        self.id = f"resp_{uuid.uuid4().hex}"
        self._body, self._model, self._texts = body, model, texts
        (self._splitter,) = chat.splitters
        self._created = int(time.time())
        self._reader, self._blocks = DeltaReader(), BlockReader()
        self._logprobs: list[dict[str, Any]] = []
        self._has_logprobs = has_logprobs(body)
        self._latest: RequestOutput | None = None
        self._number = 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for _ in self.events(0, outputs[0]):
            pass
        return self._response(self._status())

    def first_events(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        self._latest = output
        delta = self._reader.read(output.outputs[0])
        if delta is None:
            return
        finished = delta.finish_reason is not None
        logprobs: list[dict[str, Any]] = []
        if self._has_logprobs and delta.logprobs:
            logprobs = chat_content(delta.logprobs, self._texts, num_top=self._body.top_logprobs or 0)
            self._logprobs += logprobs
        deltas = self._splitter.feed(delta.text, finished=finished)
        for change, block, text in self._blocks.read(deltas, finished=finished):
            yield from self._events_of(change, block, text, logprobs)
            if change is Change.GREW and block.kind is BlockKind.TEXT:
                logprobs = []

    def last_events(self) -> Iterator[dict[str, Any]]:
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    # ------------------------------------------------------------------ parts

    def _status(self) -> str:
        reason = None if self._latest is None else self._latest.outputs[0].finish_reason
        return "incomplete" if reason in ("length", "abort") else "completed"

    def _status_of(self, block: Block) -> str:
        """The status of a closed block: what ends a sequence too early cuts its last block."""
        return self._status() if block.is_last else "completed"

    def _events_of(
        self, change: Change, block: Block, text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        part = place | {"content_index": 0}
        is_call = block.kind is BlockKind.CALL
        name = {BlockKind.REASONING: "reasoning_text", BlockKind.TEXT: "output_text"}.get(block.kind, "")
        if change is Change.OPENED:
            item = self._item(block, "in_progress")
            if is_call:
                item["arguments"] = ""
            else:
                item["content"] = []
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if not is_call:
                yield self._event("response.content_part.added", **part, part=_part(block, []))
        elif change is Change.GREW:
            if is_call:
                yield self._event("response.function_call_arguments.delta", **place, delta=text)
            else:
                extra = {"logprobs": logprobs} if block.kind is BlockKind.TEXT else {}
                yield self._event(f"response.{name}.delta", **part, delta=text, **extra)
        else:
            if is_call:
                done = {"name": block.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **done)
            else:
                extra = {"logprobs": self._logprobs} if block.kind is BlockKind.TEXT else {}
                yield self._event(f"response.{name}.done", **part, text=block.text, **extra)
                yield self._event("response.content_part.done", **part, part=_part(block, self._logprobs))
            item = self._item(block, self._status_of(block))
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            return {**head, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
        content = [_part(block, self._logprobs)]
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        form = None if body.text is None else body.text.format
        reason = None if self._latest is None else self._latest.outputs[0].finish_reason
        why = {"reason": "max_output_tokens" if reason == "length" else "aborted"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status != "in_progress" else None,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [self._item(one, self._status_of(one)) for one in self._blocks.blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if form is None else form},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if self._latest is None else self._usage(self._latest),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = usage_of([output], shows_cached=self._shows_cached)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] or {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(block: Block, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": list(logprobs)}
