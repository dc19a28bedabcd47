"""The routes of `trl vllm-serve`, as the VLLMClient of TRL 0.18 to 1.8 calls them; that of 1.12 calls vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from megatron_infer.outputs.request_output import Logprob, RequestOutput
from megatron_infer.server.body_types import Body, Message, Text, TokenId, TokenIds
from megatron_infer.server.call_limits import ID_BYTES
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.vllm_generate import VllmSampling, vllm_sampling
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import Dialect, Generator, PreparedCall, prompt_outputs, scoring_params
from megatron_infer.server.generation_request import GenerationRequest, check_limit
from megatron_infer.server.health import report_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, refused
from megatron_infer.server.openai_logprobs import Entry, by_rank
from megatron_infer.server.reply_format import ReplyFormat, as_base64
from megatron_infer.server.structured_outputs import StructuredOutputFields
from megatron_infer.server.tool_calls import call_format_of
from megatron_infer.text.tool_call_formats import HERMES

MAX_TOKENS = 16
"""The limit where a call gives none."""
FIELDS = FieldTable(SHARED)
SCORE_FIELDS = FieldTable({"temperature": refused("log probabilities are those of the model at temperature 1", 1.0)})


class TrlSampling(VllmSampling, kw_only=True):
    """What both generating routes take."""

    structured_outputs_regex: Text | None = None
    guided_decoding_regex: Text | None = None
    """Its name before TRL 0.28."""
    generation_kwargs: dict[str, Any] | None = None
    """Further fields of vLLM's SamplingParams; they go before those beside them."""


class TrlGenerateBody(TrlSampling, kw_only=True):
    prompts: Annotated[list[Text | TokenIds], Meta(min_length=1)]


class TrlChatBody(TrlSampling, kw_only=True):
    messages: Annotated[list[Annotated[list[Message], Meta(min_length=1)]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TrlScoreBody(Body, kw_only=True):
    sequences: Annotated[list[TokenIds], Meta(min_length=1)]
    prompt_lengths: list[TokenId]
    """Tokens of each sequence that get no log probabilities."""
    top_logprobs: Annotated[int, Meta(ge=1, le=100)] = 100
    response_format: Literal["json", "binary"] = "json"


def register(control_routes: ControlRoutes, machine: ControlMachine, fields: StructuredOutputFields) -> None:
    client = machine.client
    call_format = call_format_of(client.tokenizer, client.settings) or HERMES

    async def read(body: TrlGenerateBody, call: Call) -> GenerationRequest:
        asked = _sampling_of(body, fields, client, call.caller)
        return GenerationRequest.of(body, call, prompt=body.prompts, field="prompts", **asked)

    async def read_chat(body: TrlChatBody, call: Call) -> GenerationRequest:
        check_limit("messages", len(body.messages), client.settings.max_prompts, "max_prompts")
        return GenerationRequest.of(
            body,
            call,
            conversations=body.messages,
            field="messages",
            tools=body.tools or None,
            call_format=call_format,
            template=body.chat_template_kwargs or {},
            **_sampling_of(body, fields, client, call.caller),
        )

    generator = Generator(control_routes.routes, client)
    for path, body, summary, reads in (
        ("/generate/", TrlGenerateBody, "Continue texts or token ids (TRL's API)", read),
        ("/chat/", TrlChatBody, "Answer conversations (TRL's API)", read_chat),
    ):
        dialect = Dialect(
            bodies={path: body}, summary=summary, fields=FIELDS, read=reads, reply=TrlReply, streams=False
        )
        generator.register(control_routes.add, dialect)
    routes = TrlRoutes(machine)
    add = control_routes.add
    options: dict[str, Any] = {"body": TrlScoreBody, "fields": SCORE_FIELDS, "optional_body": False}
    add("POST", "/get_sequence_logprobs/", routes.score, "Score given tokens (TRL's API)", **options)
    add("POST", "/reset_prefix_cache/", routes.reset_prefix_cache, "Empty the prefix cache (TRL's API)")
    add("GET", "/health/", routes.health, "Whether requests are served (TRL's API)")


def _sampling_of(
    body: TrlSampling, fields: StructuredOutputFields, client: EngineClient, caller: str
) -> dict[str, Any]:
    """As `vllm_sampling`."""
    try:
        further = msgspec.convert(body.generation_kwargs or {}, VllmSampling)
    except msgspec.ValidationError as error:
        raise bad_request(f"generation_kwargs: {error}", "generation_kwargs", "invalid_value") from None
    regex = body.structured_outputs_regex or body.guided_decoding_regex
    if regex is not None:
        further = msgspec.structs.replace(further, structured_outputs={"regex": regex})
    given = VllmSampling(max_tokens=MAX_TOKENS, logprobs=0), body, further
    return vllm_sampling(given, fields, client, caller)


class TrlReply(ReplyFormat):
    """Completions of all prompts, those of one prompt next to each other."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, prepared.id)
        self._prompts = [one.prompt_ids for one in prepared.requests]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        ended = [one for output in outputs for one in output.outputs]
        return {
            "prompt_ids": self._prompts,
            "completion_ids": [one.token_ids for one in ended],
            **_logprob_fields([one.logprobs or () for one in ended]),
        }


class TrlRoutes:
    """Handlers of calls that do not generate."""

    def __init__(self, machine: ControlMachine) -> None:
        self._machine = machine
        self._client = machine.client

    async def health(self, call: Call) -> Reply:
        return Reply(report_of(self._client), 200 if self._client.state == "ok" else 503)

    async def reset_prefix_cache(self, call: Call) -> Reply:
        freed = await self._machine.reset_prefix_cache(running=False)
        return Reply({"message": "the prefix cache is empty", "blocks_freed": freed})

    async def score(self, call: Call) -> Reply:
        body: TrlScoreBody = call.body
        settings, num_top = self._client.settings, body.top_logprobs
        check_limit("sequences", len(body.sequences), settings.max_prompts, "max_prompts")
        if len(body.prompt_lengths) != len(body.sequences):
            text = f"prompt_lengths has {len(body.prompt_lengths)} entries for {len(body.sequences)} sequences"
            raise bad_request(f"{text}; give one for each", "prompt_lengths")
        for length, ids in zip(body.prompt_lengths, body.sequences, strict=True):
            if length > len(ids):
                raise bad_request(f"prompt_lengths has {length} for a sequence of {len(ids)} tokens", "prompt_lengths")
        check_limit("top_logprobs", num_top, settings.max_logprobs, "max_logprobs")
        tokens = [ids[length:] for ids, length in zip(body.sequences, body.prompt_lengths, strict=True)]
        is_binary = body.response_format == "binary"
        padded = max(map(len, tokens)) * (num_top + 1) * 2 * ID_BYTES if is_binary else None
        outputs = await prompt_outputs(
            self._client, call, body.sequences, scoring_params(num_top), field="sequences", prompt_bytes=padded
        )
        entries = [
            (output.prompt_logprobs or [])[length:] for output, length in zip(outputs, body.prompt_lengths, strict=True)
        ]
        if not is_binary:
            return Reply(_logprob_fields(entries))
        return Reply(await self._client.run_in_thread(_binary, entries, tokens, num_top))


def _logprob_fields(sequences: Iterable[Sequence[Entry]]) -> dict[str, Any]:
    """The likeliest tokens at each place of each sequence, the likeliest first, and their log probabilities."""
    shown = [[_ranked(entry) for entry in one] for one in sequences]
    return {
        "logprobs": [[[_finite(value) for _, value in entry] for entry in one] for one in shown],
        "logprob_token_ids": [[[token for token, _ in entry] for entry in one] for one in shown],
    }


def _ranked(entry: Entry) -> list[tuple[int, float]]:
    """(token id, log probability), the likeliest first; [] for the first token of a prompt."""
    items: list[tuple[int, Logprob]] = sorted((entry or {}).items(), key=by_rank)
    return [(token, one.logprob) for token, one in items]


def _finite(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else value


def _binary(sequences: Sequence[Sequence[Entry]], tokens: Sequence[Sequence[int]], num_top: int) -> dict[str, Any]:
    """fp32 and int32 in base64: [sequences, longest, num_top] of the likeliest tokens, [..., 1] of the given ones.

    Log probabilities behind a sequence's end, and of a first token, are -inf.
    """
    shape = (len(sequences), max(map(len, sequences)), num_top)
    top_values: Any = np.full(shape, -np.inf, "<f4")
    top_ids: Any = np.zeros(shape, "<i4")
    own_values: Any = np.full(shape[:2], -np.inf, "<f4")
    own_ids: Any = np.zeros(shape[:2], "<i4")
    for row, (entries, given) in enumerate(zip(sequences, tokens, strict=True)):
        for place, (entry, token) in enumerate(zip(entries, given, strict=True)):
            if entry is None:
                continue
            ranked = _ranked(entry)[:num_top]
            top_ids[row, place, : len(ranked)] = [one for one, _ in ranked]
            top_values[row, place, : len(ranked)] = [value for _, value in ranked]
            own_ids[row, place] = token
            own_values[row, place] = entry[token].logprob
    return {
        "logprobs_b64": as_base64(top_values, "<f4"),
        "token_ids_b64": as_base64(top_ids, "<i4"),
        "actual_logprobs_b64": as_base64(own_values, "<f4"),
        "actual_token_ids_b64": as_base64(own_ids, "<i4"),
        "shape": list(shape),
        "completion_lengths": [len(one) for one in sequences],
    }
