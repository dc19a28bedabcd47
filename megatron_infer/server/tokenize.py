"""/tokenize and /detokenize: the model's tokenizer and chat template."""

from __future__ import annotations

from typing import Any

from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.chat_prompt import prompt_ids
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.routes import App, Operation
from megatron_infer.server.schemas import DetokenizeBody, TokenizeBody
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.tools import form_of
from megatron_infer.text.tool_parsers import HERMES, CallFormat


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    form = form_of(service.tokenizer, settings) or HERMES

    async def tokenize(call: Call) -> Reply:
        body: TokenizeBody = call.body
        service.check_model(body.model)
        ids = await _ids(body, service, form)
        reply: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_length, "tokens": ids}
        if body.return_token_strs:
            tokenizer = service.require_tokenizer()
            reply["token_strs"] = [tokenizer.token_str(token) for token in ids]
        return Reply(reply)

    async def detokenize(call: Call) -> Reply:
        body: DetokenizeBody = call.body
        service.check_model(body.model)
        skip = bool(body.skip_special_tokens)
        return Reply({"prompt": await service.decode(body.tokens, skip_special=skip)})

    summary = "Token ids of a text or of a conversation"
    add = app.add
    add(
        Operation(
            method="POST", path="/tokenize", handler=tokenize, body=TokenizeBody, summary=summary, statuses=(404,)
        )
    )
    summary = "The text of token ids"
    add(
        Operation(
            method="POST", path="/detokenize", handler=detokenize, body=DetokenizeBody, summary=summary, statuses=(404,)
        )
    )


async def _ids(body: TokenizeBody, service: EngineClient, form: CallFormat) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt (a text) or messages (a conversation), and not both", "prompt")
    if body.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise bad_request(f"{name} goes with messages, not with prompt", name)
        assert body.prompt is not None
        return await service.encode(body.prompt, add_special=body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        text = "add_special_tokens goes with prompt; the chat template writes its own"
        raise bad_request(text, "add_special_tokens")
    continued = bool(body.continue_final_message)
    return await service.off_loop(
        prompt_ids,
        service.require_tokenizer(),
        body.messages,
        call_format=form,
        variables=body.chat_template_kwargs,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final=continued,
    )
