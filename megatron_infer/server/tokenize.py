"""/tokenize, /detokenize, /tokenizer_info: the model's tokenizer and chat template."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_infer.server.body_types import Body, Messages, TokenId
from megatron_infer.server.call_limits import check_ids, check_num_tokens
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import MESSAGE, SHARED, TOOL
from megatron_infer.server.generation import prompts_of
from megatron_infer.server.generation_request import GenerationRequest
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable
from megatron_infer.server.routes import Routes
from megatron_infer.server.served_models import check_model
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tool_calls import call_format_of, plain_tools
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tool_call_formats import HERMES, CallFormat

FIELDS = FieldTable(SHARED, {"messages": MESSAGE, "tools": TOOL})


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    call_format = call_format_of(client.tokenizer, settings) or HERMES

    async def tokenize(call: Call) -> Reply:
        body = call.body
        check_model(client, body.model)
        (ids,) = await prompts_of(client, _read(body, call, call_format))
        reply: dict[str, Any] = {"count": len(ids), "max_model_len": client.max_length, "tokens": ids}
        if body.return_token_strs:
            reply["token_strs"] = await client.run_in_thread(_token_strs, client.require_tokenizer(), ids)
        return Reply(reply)

    async def detokenize(call: Call) -> Reply:
        body: DetokenizeBody = call.body
        check_model(client, body.model)
        check_num_tokens(len(body.tokens), client.limits, field="tokens")
        check_ids(body.tokens, client.limits, field="tokens")
        return Reply({"prompt": await client.decode(body.tokens, skip_special=bool(body.skip_special_tokens))})

    async def info(call: Call) -> Reply:
        """The tokenizer's configuration, under vLLM's names, with the default chat template as a text."""
        tokenizer = client.require_tokenizer()
        shown = {"model_max_length": client.max_length, "chat_template": tokenizer.chat_template}
        end = tokenizer.token_str(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None
        return Reply({"eos_token": end, **tokenizer.hf_config(), **shown})

    summary = "Token ids of a text or of a conversation"
    body_of = partial(routes.fields.extend, "tokenize", TokenizeBody)
    routes.add("POST", "/tokenize", tokenize, summary, body=body_of, fields=FIELDS, statuses=(404,))
    routes.add("GET", "/tokenizer_info", info, "The tokenizer's configuration, under vLLM's names", statuses=(400,))
    routes.add("POST", "/detokenize", detokenize, "The text of token ids", body=DetokenizeBody, statuses=(404,))


def _token_strs(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_str(token) for token in ids]


def _read(body: Any, call: Call, call_format: CallFormat) -> GenerationRequest:
    """The prompt of a body. Raises ApiError 400."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt (a text) or messages (a conversation), and not both", "prompt")
    if body.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise bad_request(f"{name} goes with messages, not with prompt", name)
        return GenerationRequest.of(body, call)
    if body.add_special_tokens is not None:
        text = "add_special_tokens goes with prompt; the chat template writes its own"
        raise bad_request(text, "add_special_tokens")
    return GenerationRequest.of(
        body,
        call,
        conversations=[body.messages],
        tools=plain_tools(body.tools) if body.tools else None,
        call_format=call_format,
        template=body.chat_template_kwargs or {},
    )
