"""SGLang's POST /generate: texts or token ids in; text, token ids and logprobs out."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.server.call_limits import logprob_bytes
from megatron_infer.server.control.control_routes import ControlRoutes, QueryParams
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import generate
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.openai_logprobs import TokenTexts
from megatron_infer.server.openai_protocol import SAMPLING_FIELDS, Body, IdKey, Logit, Penalty, Text, TokenId, TokenIds
from megatron_infer.server.reply_fields import version_spans_of
from megatron_infer.server.request_fields import FieldTable, refused, rows
from megatron_infer.server.sampling_fields import check_limit, check_lists, params_from
from megatron_infer.server.served_models import adapter_of, check_model
from megatron_infer.server.structured_outputs import StructuredOutputFields

DEFAULT_MAX_NEW_TOKENS = 128
FIELDS = FieldTable(
    SHARED
    | rows(
        {
            "modalities": SHARED["video_config"],
            "input_embeds positional_embed_overrides": refused("send text or input_ids"),
            "token_ids_logprob": refused("give top_logprobs_num, which has the likeliest tokens", []),
            "return_entropy": refused("give top_logprobs_num", False),
            "return_sampling_mask": refused("use custom_params.return_top_p_token_ids", False),
            "require_reasoning": refused("use /v1/chat/completions", False),
            "max_thinking_tokens": refused("thoughts are bounded by max_new_tokens only"),
            "priority": refused("give it to /v1/completions or /inference/v1/generate", 0),
        }
    ),
    {"sampling_params": FieldTable(SHARED | {"structural_tag": refused("give json_schema, regex or ebnf", "")})},
)
StartLength = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TopCount = Annotated[int, Meta(ge=0, le=100)]


class CustomParams(Body):
    return_top_p_token_ids: bool | None = None
    """slime's field: return the ids that each token was sampled among."""


class Sampling(Body):
    """Sampling parameters under SGLang's names."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """0: nothing is generated; the reply has the log probabilities of the prompt, where asked for."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Penalty | None = None
    logit_bias: dict[IdKey, Logit] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    json_schema: str | None = None
    """A JSON schema as text. Of this, regex and ebnf, "" counts as not given."""
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams | None = None


PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
} | {name: name for name in SAMPLING_FIELDS if name in Sampling.__struct_fields__}
"""Field of `Sampling` -> field of SamplingParams."""
STRUCTURED = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}
"""Field of `Sampling` -> field of StructuredOutput; one of them at most."""


class SglangGenerateBody(Body):
    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1)] | None = None
    """Token ids, or a list of them for each prompt."""
    sampling_params: Sampling | list[Sampling] | None = None
    rid: Text | list[Text] | None = None
    """Id for /abort_request."""
    return_logprob: bool | list[bool] | None = None
    """This and the next two may be lists with an entry for each prompt."""
    logprob_start_len: StartLength | list[StartLength] | None = None
    """Position from which the prompt's log probabilities are given; -1: nowhere."""
    top_logprobs_num: TopCount | list[TopCount] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    lora_path: Text | list[Text | None] | None = None
    """Name of a loaded LoRA adapter, or a list with an entry for each prompt."""
    stream: bool | None = None


def register(control_routes: ControlRoutes, machine: ControlMachine, fields: StructuredOutputFields) -> None:
    control_routes.add(
        "POST",
        "/generate",
        SglangGenerate(machine, fields).reply,
        "Continue texts or token ids (SGLang's API)",
        body=SglangGenerateBody,
        fields=FIELDS,
        optional_body=False,
        media_types=("application/json", "text/event-stream"),
    )


class SglangGenerate:
    """The handler: a body -> one engine request per prompt."""

    def __init__(self, machine: ControlMachine, fields: StructuredOutputFields) -> None:
        self._machine, self._fields = machine, fields
        self._token_texts = TokenTexts(machine.client.tokenizer)

    async def reply(self, call: Call) -> Reply | Events:
        QueryParams(call).end()
        body: SglangGenerateBody = call.body
        client = self._machine.client
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("give text or input_ids, and not both", "text", "invalid_value")
        field, given = ("text", body.text) if body.input_ids is None else ("input_ids", body.input_ids)
        is_batch = isinstance(given, list) and not isinstance(given[0], int)
        prompts = await client.encode_prompts(given, field=field)
        sampling = Sampling() if body.sampling_params is None else body.sampling_params
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        if len(samplings) != len(prompts):
            text = f"sampling_params has {len(samplings)} entries for {len(prompts)} prompts; give one, or one for each"
            raise bad_request(text, "sampling_params", "invalid_value")
        wanted, requests = _wanted_logprobs(body, len(prompts)), []
        adapters = _adapters(body, len(prompts))
        for adapter in adapters:
            check_model(client, adapter)
        for prompt, one, logprobs, adapter in zip(prompts, samplings, wanted, adapters, strict=True):
            if logprobs.start >= len(prompt):
                text = f"logprob_start_len is {logprobs.start}, the prompt has {len(prompt)} tokens; start within it"
                raise bad_request(text, "logprob_start_len")
            params = params_from(await self._values(body, one, logprobs) | {"adapter": adapter_of(client, adapter)})
            num_shown = 0 if params.prompt_logprobs is None else len(prompt) - logprobs.start
            num_bytes = num_shown * logprob_bytes(logprobs.num_top)
            requests.append(EngineRequest(prompt_ids=prompt, params=params, prompt_bytes=num_bytes))
        requests = client.checked(requests, call, field=field)
        if body.stream and (len(requests) > 1 or requests[0].params.n > 1):
            raise bad_request("stream: one sample of one prompt at a time; ask for several calls", "stream")
        ids = [call.id] if body.rid is None else [body.rid] if isinstance(body.rid, str) else body.rid
        if len(ids) not in (1, len(requests)):
            raise bad_request(f"rid has {len(ids)} entries for {len(requests)} prompts", "rid", "invalid_value")
        ids = ids * len(requests) if len(ids) == 1 else ids
        hidden = [one.max_new_tokens == 0 for one in samplings]
        reply = SglangReply(body, ids, is_batch, wanted, hidden, self._machine, self._token_texts)
        return await generate(client, requests, reply, stream=body.stream, abort_ids=ids)

    async def _values(self, body: SglangGenerateBody, sampling: Sampling, logprobs: Logprobs) -> dict[str, Any]:
        """Fields of SamplingParams. Raises ApiError 400."""
        client = self._machine.client
        settings = client.settings
        values = {ours: value for name, ours in PARAMS.items() if (value := getattr(sampling, name)) is not None}
        # For 0 the engine samples one token, which the reply leaves out.
        values["max_tokens"] = max(1, values.get("max_tokens", DEFAULT_MAX_NEW_TOKENS))
        check_limit("n", values.get("n", 1), settings.max_n, "max_n")
        check_limit("top_logprobs_num", logprobs.num_top, settings.max_logprobs, "max_logprobs")
        check_lists(values, settings)
        if logprobs.given:
            values["logprobs"] = logprobs.num_top
            if logprobs.start >= 0:
                if body.stream:
                    text = "the prompt's log probabilities come with whole replies only; give no stream: true"
                    raise bad_request(f"logprob_start_len: {text}", "logprob_start_len")
                values["prompt_logprobs"] = logprobs.num_top
        if body.return_routed_experts:
            values["return_routing"] = True
        if sampling.custom_params is not None and sampling.custom_params.return_top_p_token_ids:
            values["return_support"] = True
        if client.tokenizer is None:
            values["detokenize"] = False
        given = [name for name in STRUCTURED if getattr(sampling, name)]
        if len(given) > 1:
            text = f"{' and '.join(given)} both say what the answer must be; give one"
            raise bad_request(text, given[-1], "invalid_structured_output")
        for name in given:
            values["structured"] = await self._fields.compiled(name, {STRUCTURED[name]: getattr(sampling, name)})
        return values


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a prompt's reply has of them."""

    given: bool
    start: int
    """Position of the first prompt token that has them; -1: none."""
    num_top: int


def _adapters(body: SglangGenerateBody, num_prompts: int) -> list[str | None]:
    """One for each prompt. Raises ApiError 400."""
    given = body.lora_path
    names = given if isinstance(given, list) else [given] * num_prompts
    if len(names) != num_prompts:
        text = f"lora_path has {len(names)} entries for {num_prompts} prompts; give one, or one for each"
        raise bad_request(text, "lora_path", "invalid_value")
    return names


def _wanted_logprobs(body: SglangGenerateBody, num_prompts: int) -> list[Logprobs]:
    """One for each prompt. Raises ApiError 400."""
    columns: list[list[Any]] = []
    for name, default in (("return_logprob", False), ("logprob_start_len", -1), ("top_logprobs_num", 0)):
        value = getattr(body, name)
        column = value if isinstance(value, list) else [default if value is None else value] * num_prompts
        if len(column) != num_prompts:
            text = f"{name} has {len(column)} entries for {num_prompts} prompts; give one, or one for each"
            raise bad_request(text, name, "invalid_value")
        columns.append(column)
    wanted = [Logprobs(*values) for values in zip(*columns, strict=True)]
    if any(one.num_top and not one.given for one in wanted):
        raise bad_request("top_logprobs_num is given without return_logprob: true; give both", "top_logprobs_num")
    return wanted


class SglangReply:
    """The ReplyFormat of one call. As SGLang's, each event of a stream has the whole output so far."""

    def __init__(
        self,
        body: SglangGenerateBody,
        ids: list[str],
        is_batch: bool,
        wanted: list[Logprobs],
        hidden: list[bool],
        machine: ControlMachine,
        token_texts: TokenTexts,
    ) -> None:
        """ids, wanted, hidden: one for each request. is_batch: whether the reply is a list.

        hidden: max_new_tokens was 0, and the sampled token is left out.
        """
        self._body, self._ids, self._is_batch = body, ids, is_batch
        self._wanted, self._hidden = wanted, hidden
        self._machine, self._token_texts = machine, token_texts
        self._began = time.monotonic()

    def whole(self, outputs: list[RequestOutput]) -> Any:
        replies = [self._reply(index, output, one) for index, output in enumerate(outputs) for one in output.outputs]
        return replies if self._is_batch or len(replies) > 1 else replies[0]

    def first_events(self) -> tuple[()]:
        return ()

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        yield self._reply(index, output, output.outputs[0])

    def last_events(self) -> tuple[()]:
        return ()

    def _reply(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        if self._hidden[index]:
            one = _without_output(one)
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": _finish_reason(one),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(one.token_ids),
            "cached_tokens": output.num_cached_tokens if self._machine.client.settings.show_cached_tokens else 0,
            "weight_version": str(self._machine.shown_version(one.spans[-1].policy_version if one.spans else None)),
            "version_spans": version_spans_of(one),
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._wanted[index].given:
            meta |= self._logprobs(self._wanted[index], output, one)
        if self._body.return_routed_experts and one.routing is not None:
            meta["routed_experts"] = routed_experts_field(one)
        if one.support is not None:
            meta |= support_fields(one.support)
        return {"text": one.text, "output_ids": one.token_ids, "meta_info": meta}

    def _logprobs(self, wanted: Logprobs, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """(logprob, token id, text or null) of each token and, where asked for, of the top tokens.

        The first token of a prompt has no log probability (null).
        """
        sampled, top = self._columns(one.token_ids, one.logprobs or (), wanted.num_top)
        fields: dict[str, Any] = {"output_token_logprobs": sampled, "output_token_logprobs_length": len(sampled)}
        if wanted.num_top:
            fields["output_top_logprobs"] = top
        if wanted.start >= 0 and output.prompt_logprobs is not None:
            ids, entries = output.prompt_token_ids[wanted.start :], output.prompt_logprobs[wanted.start :]
            fields["input_token_logprobs"], top = self._columns(ids, entries, wanted.num_top)
            if wanted.num_top:
                fields["input_top_logprobs"] = top
        return fields

    def _columns(
        self, ids: Sequence[int], entries: Sequence[dict[int, Logprob] | None], num_top: int
    ) -> tuple[list[Any], list[Any]]:
        """The entries of the tokens themselves, and of the top tokens of each."""
        text_of = self._token_texts.text if self._body.return_text_in_logprobs else lambda token: None
        chosen: list[Any] = []
        top: list[Any] = []
        for token, entry in zip(ids, entries, strict=False):  # a stream may bring a token before its entry
            shown = {one: (value.logprob, one, text_of(one)) for one, value in (entry or {}).items()}
            chosen.append(shown.get(token, (None, token, text_of(token))))
            top.append(sorted(shown.values(), key=lambda item: -item[0])[:num_top] if shown else None)
        return chosen, top


def _without_output(one: CompletionOutput) -> CompletionOutput:
    """The output of max_new_tokens 0."""
    routing = None if one.routing is None else one.routing[:-1]
    reason = None if one.finish_reason is None else "length"
    return replace(
        one, text="", token_ids=[], logprobs=[], spans=[], support=None, routing=routing, finish_reason=reason
    )


def routed_experts_field(one: CompletionOutput) -> str:
    """int32 [prompt + output - 1, layers, top-k] as base64."""
    return _int32_base64(one.routing)


def support_fields(support: TokenSupport) -> dict[str, str]:
    """Token i was sampled among ids[offsets[i] : offsets[i + 1]]: the whole vocabulary where none was filtered."""
    rows = [support.ids_at(position) for position in range(len(support))]
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([np.empty(0, np.int32), *rows])
    return {"top_p_token_ids": _int32_base64(ids), "top_p_token_offsets": _int32_base64(offsets)}


def _int32_base64(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values, np.int32).tobytes()).decode()


def _finish_reason(one: CompletionOutput) -> dict[str, Any] | None:
    if one.finish_reason is None:
        return None
    if one.finish_reason == "length":
        return {"type": "length", "length": len(one.token_ids)}
    if one.finish_reason == "stop":
        return {"type": "stop", "matched": one.stop_reason or (one.token_ids[-1] if one.token_ids else None)}
    return {"type": "abort", "message": f"the request was ended ({one.finish_reason})"}
