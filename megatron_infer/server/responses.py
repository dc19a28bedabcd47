"""/v1/responses: OpenAI's newer API of a conversation, whole or as events. Nothing is stored.

A body becomes a chat body (`responses_input`); ResponsesReply shows the output as items: reasoning, messages, function
calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.chat_completions import read_as_chat
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation import CHAT, Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest
from megatron_infer.server.openai_logprobs import chat_content
from megatron_infer.server.reply_blocks import Block, BlockKind, BlockReply, Change
from megatron_infer.server.reply_format import Delta, usage_of
from megatron_infer.server.request_fields import ignore
from megatron_infer.server.responses_input import FIELDS, LOGPROBS, NAMES, ResponsesBody, chat_of, has_logprobs
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: ResponsesBody, call: Call) -> GenerationRequest:
        if set(body.include or ()) - {LOGPROBS}:
            text = f"replies have all that there is; {LOGPROBS} acts"
            ignore(call.ignored, "include", text, strict=settings.strict_fields)
        return read_as_chat(chat_of(body), routes, call, client)

    dialect = Dialect(
        bodies={"/v1/responses": ResponsesBody},
        summary="Answer a conversation (OpenAI's Responses API)",
        fields=FIELDS,
        read=read,
        reply=ResponsesReply,
        module_fields=CHAT,
        names=NAMES,
        named_events=True,
    )
    Generator(routes, client).register(routes.add, dialect, statuses=GENERATION_STATUSES)


class ResponsesReply(BlockReply):
    """A whole reply is made as a stream's last event is."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, f"resp_{uuid.uuid4().hex}")
        self._body: ResponsesBody = prepared.body
        self._texts = prepared.token_texts
        self._created = int(time.time())
        self._logprobs: list[dict[str, Any]] = []
        self._new_logprobs: list[dict[str, Any]] = []
        """Of the tokens whose text is to come."""
        self._number = 0

    def reply(self) -> dict[str, Any]:
        return self._response(self._status())

    def first_events(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def chunks(self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta) -> Iterator[Any]:
        self._new_logprobs = []
        if has_logprobs(self._body) and delta.logprobs:
            self._new_logprobs = chat_content(delta.logprobs, self._texts, num_top=self._body.top_logprobs or 0)
            self._logprobs += self._new_logprobs
        yield from super().chunks(index, output, one, delta)

    def last_events(self) -> Iterator[dict[str, Any]]:
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def _status(self) -> str:
        return "incomplete" if self._finish_reason() in ("length", "abort") else "completed"

    def _finish_reason(self) -> str | None:
        return None if self.output is None else self.output.outputs[0].finish_reason

    def _status_of(self, block: Block) -> str:
        """The status of a closed block: what ends a sequence too early cuts its last block."""
        return self._status() if block.is_last else "completed"

    def block_events(self, change: Change, block: Block, text: str) -> Iterator[dict[str, Any]]:
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
                extra = {}
                if block.kind is BlockKind.TEXT:
                    extra, self._new_logprobs = {"logprobs": self._new_logprobs}, []
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
        reason = "max_output_tokens" if self._finish_reason() == "length" else "aborted"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status != "in_progress" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [self._item(one, self._status_of(one)) for one in self.blocks],
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
            "usage": None if self.output is None else self._usage(self.output),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = usage_of([output], shows_cached=self.shows_cached)
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
