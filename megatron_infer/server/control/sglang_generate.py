"""SGLang's POST /generate: texts or token ids in; text, token ids and logprobs out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.server.body_types import (
    Body,
    CommonSampling,
    NumTokensOrNone,
    Seed,
    Text,
    TokenId,
    TokenIds,
    TopCount,
)
from megatron_infer.server.call_limits import check_num_prompts, logprob_bytes
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest, sampling_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, refused
from megatron_infer.server.reply_format import ReplyFormat, as_base64, version_spans_of
from megatron_infer.server.served_models import adapter_of, check_model
from megatron_infer.server.structured_outputs import StructuredOutputFields

DEFAULT_MAX_NEW_TOKENS = 128
FIELDS = FieldTable(
    SHARED
    | {
        "modalities": SHARED["video_config"],
        "input_embeds positional_embed_overrides": refused("send text or input_ids"),
        "token_ids_logprob": refused("give top_logprobs_num, which has the likeliest tokens", []),
        "return_entropy": refused("give top_logprobs_num", False),
        "return_sampling_mask": refused("use custom_params.return_top_p_token_ids", False),
        "require_reasoning": refused("use /v1/chat/completions", False),
        "max_thinking_tokens": refused("thoughts are bounded by max_new_tokens only"),
        "priority": refused("give it to /v1/completions or /inference/v1/generate", 0),
    },
    {"sampling_params": FieldTable(SHARED | {"structural_tag": refused("give json_schema, regex or ebnf", "")})},
)
StartLength = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class CustomParams(Body):
    return_top_p_token_ids: bool | None = None
    """slime's field: return the ids that each token was sampled among."""


class Sampling(CommonSampling):
    """Sampling parameters under SGLang's names."""

    max_tokens: NumTokensOrNone | None = msgspec.field(default=None, name="max_new_tokens")
    """0: nothing is generated; the reply has the log probabilities of the prompt, where asked for."""
    min_tokens: NumTokensOrNone | None = msgspec.field(default=None, name="min_new_tokens")
    include_stop_str_in_output: bool | None = msgspec.field(default=None, name="no_stop_trim")
    seed: Seed | None = msgspec.field(default=None, name="sampling_seed")
    json_schema: str | None = None
    """A JSON schema as text. Of this, regex and ebnf, "" counts as not given."""
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams | None = None


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


class Prompt(msgspec.Struct):
    """What a call asks for one of its prompts."""

    sampling: Sampling
    has_logprobs: bool
    logprobs_start: int
    """Position of the first prompt token with log probabilities; -1: none."""
    num_top: int
    adapter: str | None


def register(control_routes: ControlRoutes, machine: ControlMachine, fields: StructuredOutputFields) -> None:
    client = machine.client

    async def read(body: SglangGenerateBody, call: Call) -> GenerationRequest:
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("give text or input_ids, and not both", "text", "invalid_value")
        field, given = ("text", body.text) if body.input_ids is None else ("input_ids", body.input_ids)
        if is_batch(body):
            check_num_prompts(len(given or ()), client.settings, field=field)
        prompts = prompts_of(body)
        if body.stream and (len(prompts) > 1 or (prompts[0].sampling.n or 1) > 1):
            raise bad_request("stream: one sample of one prompt at a time; ask for several calls", "stream")
        each = []
        for prompt in prompts:
            check_model(client, prompt.adapter)
            values = _values_of(body, prompt) | {"adapter": adapter_of(client, prompt.adapter)}
            each.append(values)

        async def grammars() -> list[StructuredOutput | None]:
            return [await _structured(prompt.sampling, fields, call.caller) for prompt in prompts]

        return GenerationRequest.of(
            body,
            call,
            prompt=given,
            field=field,
            sampling={} if client.tokenizer is not None else {"detokenize": False},
            each=each,
            grammars=grammars,
            names={"logprobs": "top_logprobs_num"},
            prompt_bytes=lambda place, num_tokens: _prompt_bytes(prompts[place], num_tokens),
        )

    dialect = Dialect(
        bodies={"/generate": SglangGenerateBody},
        summary="Continue texts or token ids (SGLang's API)",
        fields=FIELDS,
        read=read,
        reply=SglangReply,
    )
    Generator(control_routes.routes, client).register(control_routes.add, dialect)


def is_batch(body: SglangGenerateBody) -> bool:
    """Whether the prompts, and with them the replies, are in a list."""
    given: Any = body.text if body.input_ids is None else body.input_ids
    return isinstance(given, list) and not isinstance(given[0], int)


def prompts_of(body: SglangGenerateBody) -> list[Prompt]:
    """One for each prompt. Raises ApiError 400 for lists of other lengths."""
    num_prompts = len(body.text or body.input_ids or ()) if is_batch(body) else 1
    columns: list[list[Any]] = []
    for name, default in (
        ("sampling_params", Sampling()),
        ("return_logprob", False),
        ("logprob_start_len", -1),
        ("top_logprobs_num", 0),
        ("lora_path", None),
    ):
        value = getattr(body, name)
        column = value if isinstance(value, list) else [default if value is None else value] * num_prompts
        if len(column) != num_prompts:
            text = f"{name} has {len(column)} entries for {num_prompts} prompts; give one, or one for each"
            raise bad_request(text, name, "invalid_value")
        columns.append(column)
    prompts = [Prompt(*values) for values in zip(*columns, strict=True)]
    if any(one.num_top and not one.has_logprobs for one in prompts):
        raise bad_request("top_logprobs_num is given without return_logprob: true; give both", "top_logprobs_num")
    return prompts


def _values_of(body: SglangGenerateBody, prompt: Prompt) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ApiError 400."""
    values = sampling_of(prompt.sampling)
    # For 0 the engine samples one token, which the reply leaves out.
    values["max_tokens"] = max(1, values.get("max_tokens", DEFAULT_MAX_NEW_TOKENS))
    if prompt.has_logprobs:
        values["logprobs"] = prompt.num_top
        if prompt.logprobs_start >= 0:
            if body.stream:
                text = "the prompt's log probabilities come with whole replies only; give no stream: true"
                raise bad_request(f"logprob_start_len: {text}", "logprob_start_len")
            values["prompt_logprobs"] = prompt.num_top
    values["return_routing"] = bool(body.return_routed_experts)
    custom = prompt.sampling.custom_params
    values["return_support"] = custom is not None and bool(custom.return_top_p_token_ids)
    return values


async def _structured(sampling: Sampling, fields: StructuredOutputFields, caller: str) -> StructuredOutput | None:
    """What the text must be; None: any text. Raises ApiError 400."""
    given = [name for name in STRUCTURED if getattr(sampling, name)]
    if len(given) > 1:
        text = f"{' and '.join(given)} both say what the answer must be; give one"
        raise bad_request(text, given[-1], "invalid_structured_output")
    for name in given:
        return await fields.compiled(name, {STRUCTURED[name]: getattr(sampling, name)}, caller)
    return None


def _prompt_bytes(prompt: Prompt, num_tokens: int) -> int:
    start = prompt.logprobs_start
    return (num_tokens - start) * logprob_bytes(prompt.num_top) if prompt.has_logprobs and start >= 0 else 0


class SglangReply(ReplyFormat):
    """As SGLang's, each event of a stream has the whole output so far."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__(prepared, prepared.id)
        self._body: SglangGenerateBody = prepared.body
        self._prompts = prompts_of(self._body)
        self._token_texts = prepared.token_texts
        self._began = time.monotonic()
        for prompt, request in zip(self._prompts, prepared.requests, strict=True):
            start, num_tokens = prompt.logprobs_start, len(request.prompt_ids)
            if start >= num_tokens:
                text = f"logprob_start_len is {start}, the prompt has {num_tokens} tokens; start within it"
                raise bad_request(text, "logprob_start_len")
        rid, num_prompts = self._body.rid, len(self._prompts)
        ids = [prepared.id] if rid is None else [rid] if isinstance(rid, str) else rid
        if len(ids) not in (1, num_prompts):
            raise bad_request(f"rid has {len(ids)} entries for {num_prompts} prompts", "rid", "invalid_value")
        self._ids = self.abort_ids = ids * num_prompts if len(ids) == 1 else ids

    def whole(self, outputs: list[RequestOutput]) -> Any:
        replies = [self._reply(index, output, one) for index, output in enumerate(outputs) for one in output.outputs]
        return replies if is_batch(self._body) or len(replies) > 1 else replies[0]

    def events(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        yield self._reply(index, output, output.outputs[0])

    def _reply(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        prompt = self._prompts[index]
        if prompt.sampling.max_tokens == 0:
            one = _without_output(one)
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": _finish_reason(one),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(one.token_ids),
            "cached_tokens": output.num_cached_tokens if self.shows_cached else 0,
            "weight_version": str(self.weight_version(one)),
            "version_spans": version_spans_of(one),
            "e2e_latency": time.monotonic() - self._began,
        }
        if prompt.has_logprobs:
            meta |= self._logprobs(prompt, output, one)
        if self._body.return_routed_experts and one.routing is not None:
            # int32 [prompt + output - 1, layers, top-k]
            meta["routed_experts"] = as_base64(one.routing, "<i4")
        if one.support is not None:
            meta |= support_fields(one.support)
        return {"text": one.text, "output_ids": one.token_ids, "meta_info": meta}

    def _logprobs(self, prompt: Prompt, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """(logprob, token id, text or null) of each token and, where asked for, of the top tokens.

        The first token of a prompt has no log probability (null).
        """
        sampled, top = self._columns(one.token_ids, one.logprobs or (), prompt.num_top)
        fields: dict[str, Any] = {"output_token_logprobs": sampled, "output_token_logprobs_length": len(sampled)}
        if prompt.num_top:
            fields["output_top_logprobs"] = top
        if prompt.logprobs_start >= 0 and output.prompt_logprobs is not None:
            shown = slice(prompt.logprobs_start, None)
            columns = self._columns(output.prompt_token_ids[shown], output.prompt_logprobs[shown], prompt.num_top)
            fields["input_token_logprobs"], top = columns
            if prompt.num_top:
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


def support_fields(support: TokenSupport) -> dict[str, str]:
    """Token i was sampled among ids[offsets[i] : offsets[i + 1]]: the whole vocabulary where none was filtered."""
    rows = [support.ids_at(position) for position in range(len(support))]
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([np.empty(0, np.int32), *rows])
    return {"top_p_token_ids": as_base64(ids, "<i4"), "top_p_token_offsets": as_base64(offsets, "<i4")}


def _finish_reason(one: CompletionOutput) -> dict[str, Any] | None:
    if one.finish_reason is None:
        return None
    if one.finish_reason == "length":
        return {"type": "length", "length": len(one.token_ids)}
    if one.finish_reason == "stop":
        return {"type": "stop", "matched": one.stop_reason or (one.token_ids[-1] if one.token_ids else None)}
    return {"type": "abort", "message": f"the request was ended ({one.finish_reason})"}
