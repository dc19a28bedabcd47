"""PUT /api: the text generation server of Megatron-LM, for its `tools/text_generation_cli.py` and like clients."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.body_types import Body, NumTokensOrNone, Seed, ShareOrNone, Temperature, Text, TopK
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest, sampling_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, refused
from megatron_infer.server.reply_format import ReplyFormat, sampled_logprobs
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig

FIELDS = FieldTable(
    SHARED
    | {
        "add_BOS": refused("texts begin with the tokenizer's special tokens", False),
        "top_p_decay top_p_bound": refused("top_p is the same for all tokens", 0.0),
        "stop_on_eol stop_on_double_eol": refused("give stop at /v1/completions", False),
        "prevent_newline_after_colon": refused("give bad_token_ids at /v1/completions", False),
        "stop_token": refused("give stop_token_ids at /v1/completions"),
    }
)


class GenerateBody(Body, kw_only=True):
    prompts: Annotated[list[Text], Meta(min_length=1, max_length=128)]
    max_tokens: NumTokensOrNone = msgspec.field(default=64, name="tokens_to_generate")
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: ShareOrNone | None = None
    """0 sets no limit."""
    seed: Seed | None = msgspec.field(default=None, name="random_seed")
    logprobs: bool = False


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: GenerateBody, call: Call) -> GenerationRequest:
        if body.max_tokens == 0 and not body.logprobs:
            raise bad_request("tokens_to_generate is 0, which gives something with logprobs: true only", "max_tokens")
        zero = 0 if body.logprobs else None
        sampling = sampling_of(body) | {
            "logprobs": zero,
            "prompt_logprobs": zero,
            "max_tokens": max(1, body.max_tokens),
        }
        sampling["top_p"] = body.top_p or 1.0
        a_token = call_limits.NUMBER_BYTES + call_limits.logprob_bytes(zero)
        further: dict[str, Any] = {"prompt": body.prompts, "field": "prompts", "echo": True, "sampling": sampling}
        return GenerationRequest.of(body, call, prompt_bytes=lambda place, count: count * a_token, **further)

    dialect = Dialect(
        method="PUT",
        bodies={"/api": GenerateBody},
        summary="Continue texts (Megatron-LM's API)",
        fields=FIELDS,
        read=read,
        reply=GenerateReply,
        streams=False,
    )
    Generator(routes, client).register(routes.add, dialect, statuses=GENERATION_STATUSES)


class GenerateReply(ReplyFormat):
    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, prepared.id)
        self._body: GenerateBody = prepared.body
        self._text_of = prepared.token_texts.text

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Prompts and what follows, each as one; a token that only the engine asked for is left out."""
        body, most = self._body, self._body.max_tokens
        firsts = [output.outputs[0] for output in outputs]
        ids = [[*output.prompt_token_ids, *one.token_ids[:most]] for output, one in zip(outputs, firsts, strict=True)]
        texts = zip(body.prompts, firsts, strict=True)
        reply: dict[str, Any] = {
            "text": [prompt + (one.text if most else "") for prompt, one in texts],
            "tokens": ids,
            "segments": [[self._text_of(token) for token in one] for one in ids],
        }
        if body.logprobs:
            reply["logprobs"] = [
                [
                    *(entry[token].logprob for token, entry in _scored(output)),
                    *sampled_logprobs(one.logprobs or ())[:most],
                ]
                for output, one in zip(outputs, firsts, strict=True)
            ]
        return reply


def _scored(output: RequestOutput) -> list[tuple[int, Any]]:
    """Tokens of the prompt after the first, with their log probabilities; none of a prompt that was not computed."""
    if output.prompt_logprobs is None:
        return []
    return list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
