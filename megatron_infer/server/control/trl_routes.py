"""The routes of `trl vllm-serve`, as the VLLMClient of TRL 0.18 to 1.8 calls them; that of 1.12 calls vLLM's."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import Logprob
from megatron_infer.server.call_limits import ID_BYTES
from megatron_infer.server.chat_prompt import prompt_ids
from megatron_infer.server.control.control_routes import ControlRoutes, QueryParams
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.vllm_generate import VllmSampling, vllm_params
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import prompt_outputs, whole_outputs
from megatron_infer.server.health import report_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import Entry, by_rank
from megatron_infer.server.openai_protocol import Body, Message, Text, TokenId, TokenIds
from megatron_infer.server.request_fields import FieldTable, refused
from megatron_infer.server.sampling_fields import check_limit
from megatron_infer.server.structured_outputs import StructuredOutputFields
from megatron_infer.server.tool_calls import call_format_of
from megatron_infer.text.tool_parsers import HERMES

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
    routes = TrlRoutes(machine, fields)
    add = control_routes.add
    for path, handler, summary, body, fields_without_action in (
        ("/generate/", routes.generate, "Continue texts or token ids (TRL's API)", TrlGenerateBody, FIELDS),
        ("/chat/", routes.chat, "Answer conversations (TRL's API)", TrlChatBody, FIELDS),
        ("/get_sequence_logprobs/", routes.score, "Score given tokens (TRL's API)", TrlScoreBody, SCORE_FIELDS),
    ):
        add("POST", path, handler, summary, body=body, fields=fields_without_action, optional_body=False)
    add("POST", "/reset_prefix_cache/", routes.reset_prefix_cache, "Empty the prefix cache (TRL's API)")
    add("GET", "/health/", routes.health, "Whether requests are served (TRL's API)")


class TrlRoutes:
    """Handlers."""

    def __init__(self, machine: ControlMachine, fields: StructuredOutputFields) -> None:
        self._machine, self._fields, self._client = machine, fields, machine.client

    async def health(self, call: Call) -> Reply:
        QueryParams(call).end()
        return Reply(report_of(self._client), 200 if self._client.state == "ok" else 503)

    async def reset_prefix_cache(self, call: Call) -> Reply:
        QueryParams(call).end()
        freed = await self._machine.reset_prefix_cache(running=False)
        return Reply({"message": "the prefix cache is empty", "blocks_freed": freed})

    async def generate(self, call: Call) -> Reply:
        QueryParams(call).end()
        body: TrlGenerateBody = call.body
        prompts = await self._client.encode_prompts(body.prompts, field="prompts")
        return await self._drawn(call, prompts, body, "prompts")

    async def chat(self, call: Call) -> Reply:
        QueryParams(call).end()
        body: TrlChatBody = call.body
        client = self._client
        check_limit("messages", len(body.messages), client.settings.max_prompts, "max_prompts")
        prompts = [
            await client.tokenize(
                prompt_ids,
                client.require_tokenizer(),
                messages,
                limits=client.limits,
                tools=body.tools or None,
                call_format=call_format_of(client.tokenizer, client.settings) or HERMES,
                variables=body.chat_template_kwargs,
            )
            for messages in body.messages
        ]
        return await self._drawn(call, prompts, body, "messages")

    async def _drawn(self, call: Call, prompts: list[list[int]], body: TrlSampling, field: str) -> Reply:
        """Completions of all prompts, those of one prompt next to each other."""
        try:
            further = msgspec.convert(body.generation_kwargs or {}, VllmSampling)
        except msgspec.ValidationError as error:
            raise bad_request(f"generation_kwargs: {error}", "generation_kwargs", "invalid_value") from None
        regex = body.structured_outputs_regex or body.guided_decoding_regex
        if regex is not None:
            further = msgspec.structs.replace(further, structured_outputs={"regex": regex})
        usual = VllmSampling(max_tokens=MAX_TOKENS, logprobs=0)
        params = await vllm_params((usual, body, further), self._fields, self._client)
        requests = [EngineRequest(prompt_ids=ids, params=params) for ids in prompts]
        outputs = await whole_outputs(self._client, requests, call, field=field)
        shown = [[_ranked(entry) for entry in one.logprobs or ()] for output in outputs for one in output.outputs]
        return Reply(
            {
                "prompt_ids": prompts,
                "completion_ids": [one.token_ids for output in outputs for one in output.outputs],
                "logprobs": [[[_finite(value) for _, value in entry] for entry in one] for one in shown],
                "logprob_token_ids": [[[token for token, _ in entry] for entry in one] for one in shown],
            }
        )

    async def score(self, call: Call) -> Reply:
        QueryParams(call).end()
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
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=num_top, detokenize=False, ignore_eos=True
        )
        longest = max(len(ids) - length for ids, length in zip(body.sequences, body.prompt_lengths, strict=True))
        padded = longest * (num_top + 1) * 2 * ID_BYTES if body.response_format == "binary" else None
        requests = [EngineRequest(prompt_ids=ids, params=params, prompt_bytes=padded) for ids in body.sequences]
        outputs = await prompt_outputs(self._client, requests, call, field="sequences")
        entries = [
            (output.prompt_logprobs or [])[length:] for output, length in zip(outputs, body.prompt_lengths, strict=True)
        ]
        if body.response_format == "json":
            shown = [[_ranked(entry) for entry in one] for one in entries]
            return Reply(
                {
                    "logprobs": [[[_finite(value) for _, value in entry] for entry in one] for one in shown],
                    "logprob_token_ids": [[[token for token, _ in entry] for entry in one] for one in shown],
                }
            )
        tokens = [ids[length:] for ids, length in zip(body.sequences, body.prompt_lengths, strict=True)]
        return Reply(await self._client.run_in_thread(_binary, entries, tokens, num_top))


def _ranked(entry: Entry) -> list[tuple[int, float]]:
    """(token id, log probability), the likeliest first; [] for the first token of a prompt."""
    items: list[tuple[int, Logprob]] = sorted((entry or {}).items(), key=by_rank)
    return [(token, one.logprob) for token, one in items]


def _finite(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else value


def _binary(entries: Sequence[Sequence[Entry]], tokens: Sequence[Sequence[int]], num_top: int) -> dict[str, Any]:
    """fp32 and int32 in base64: [sequences, longest, num_top] of the likeliest tokens, [..., 1] of the given ones.

    Log probabilities behind a sequence's end, and of a first token, are -inf.
    """
    longest = max(map(len, entries))
    top, own = _Rows(num_top), _Rows(1)
    for one, ids in zip(entries, tokens, strict=True):
        for entry, token in zip(one, ids, strict=True):
            top.add(_ranked(entry)[:num_top])
            own.add([] if entry is None else [(token, entry[token].logprob)])
        for _ in range(longest - len(one)):
            top.add([])
            own.add([])
    return {
        "logprobs_b64": _base64(top.values),
        "token_ids_b64": _base64(top.ids),
        "actual_logprobs_b64": _base64(own.values),
        "actual_token_ids_b64": _base64(own.ids),
        "shape": [len(entries), longest, num_top],
        "completion_lengths": [len(one) for one in entries],
    }


class _Rows:
    """Rows of `width` tokens with their log probabilities, padded."""

    def __init__(self, width: int) -> None:
        self._width, self.values, self.ids = width, array("f"), array("i")

    def add(self, row: Sequence[tuple[int, float]]) -> None:
        missing = self._width - len(row)
        self.ids.extend([*(token for token, _ in row), *([0] * missing)])
        self.values.extend([*(value for _, value in row), *([-math.inf] * missing)])


def _base64(values: array[Any]) -> str:
    assert sys.byteorder == "little", "clients read the bytes as they are in memory"
    return base64.b64encode(values.tobytes()).decode("ascii")
