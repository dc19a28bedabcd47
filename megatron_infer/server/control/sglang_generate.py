"""POST /generate as SGLang's clients know it: a text or token ids in; text, token ids and log probabilities out."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.server.calls import Call, Events, Reply
from megatron_infer.server.control.common import Dialect, Query
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inflight import Job, params_from
from megatron_infer.server.openai_logprobs import TokenTexts
from megatron_infer.server.sampling_fields import check_limit, spans_of
from megatron_infer.server.schemas import Body, IdKey, Logit, Text, TokenId, TokenIds
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.structured_fields import Fields

DEFAULT_MAX_NEW_TOKENS = 128


class CustomParams(Body):
    return_top_p_token_ids: bool | None = None
    """slime's: which ids each token was drawn among."""


class Sampling(Body):
    """SGLang's names of sampling parameters."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    logit_bias: dict[IdKey, Logit] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Of no effect with tokenizers that are read from tokenizer.json: they put none there."""
    no_stop_trim: bool | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    json_schema: Text | None = None
    """As JSON text."""
    regex: Text | None = None
    ebnf: Text | None = None
    custom_params: CustomParams | None = None


NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)


STRUCTURED = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}
"""What the text must be, here and in StructuredOutput; one of them."""


class GenerateBody(Body):
    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1)] | None = None
    """Token ids, or a list of them for each prompt."""
    sampling_params: Sampling | list[Sampling] | None = None
    rid: Text | list[Text] | None = None
    """What /abort_request ends it by."""
    return_logprob: bool | None = None
    logprob_start_len: Literal[-1] | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=100)] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None


def register(dialect: Dialect, machine: ControlMachine, service: EngineClient, fields: Fields) -> None:
    dialect.add(
        "POST",
        "/generate",
        Generate(machine, service, dialect.settings, fields).answer,
        "Continue texts or token ids (SGLang's dialect)",
        body=GenerateBody,
        optional_body=False,
        media_types=("application/json", "text/event-stream"),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    body: GenerateBody
    jobs: list[Job]
    names: list[str]
    """One for each job."""
    is_batch: bool
    began: float


class Generate:
    """The handler, and how its replies look."""

    def __init__(self, machine: ControlMachine, service: EngineClient, settings: ServerConfig, fields: Fields) -> None:
        self._fields = fields
        self._machine, self._service, self._settings = machine, service, settings
        self._token_texts = TokenTexts(service.tokenizer)

    async def answer(self, call: Call) -> Reply | Events:
        Query(call).end()
        asked = await self._prepare(call.body, call.id)
        if asked.body.stream:
            items = self._stream(asked)
            await anext(items)  # refusals are answers with a status of their own
            return Events(items)
        async with self._service.fly(asked.jobs, names=asked.names) as flight:
            outputs = await flight.results()
        replies = [
            await self._reply(asked, place, output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        return Reply(replies if asked.is_batch or len(replies) > 1 else replies[0])

    # ------------------------------------------------------------------ what is asked

    async def _prepare(self, body: GenerateBody, call_id: str) -> _Asked:
        prompts, is_batch = await self._prompts(body)
        given = body.sampling_params
        many = given if isinstance(given, list) else [Sampling() if given is None else given] * len(prompts)
        if len(many) != len(prompts):
            text = f"sampling_params has {len(many)} entries for {len(prompts)} prompts; give one, or one for each"
            raise bad_request(text, "sampling_params", "invalid_value")
        jobs = [
            Job(prompt_ids=ids, params=params_from(await self._values(body, one)))
            for ids, one in zip(prompts, many, strict=True)
        ]
        for job in jobs:
            await self._service.check(job)
        if body.stream and (len(jobs) > 1 or jobs[0].params.n > 1):
            raise bad_request("stream: one sample of one prompt at a time; ask for several calls", "stream")
        names = [call_id] * len(jobs)
        if body.rid is not None:
            names = [body.rid] if isinstance(body.rid, str) else body.rid
            if len(names) not in (1, len(jobs)):
                raise bad_request(f"rid has {len(names)} entries for {len(jobs)} prompts", "rid", "invalid_value")
            names = names * len(jobs) if len(names) == 1 else names
        return _Asked(body, jobs, names, is_batch, time.monotonic())

    async def _prompts(self, body: GenerateBody) -> tuple[list[list[int]], bool]:
        """Token ids of each prompt, and whether a list was given."""
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("give text or input_ids, and not both", "text", "invalid_value")
        if body.input_ids is not None:
            is_batch = isinstance(body.input_ids[0], list)
            if any(isinstance(item, list) is not is_batch for item in body.input_ids):
                raise bad_request("input_ids holds token ids or lists of them, not a mixture", "input_ids")
            found: list[Any] = list(body.input_ids) if is_batch else [list(body.input_ids)]
            return self._limited(found), is_batch
        is_batch = isinstance(body.text, list)
        texts: list[str] = body.text if isinstance(body.text, list) else [body.text or ""]
        return [await self._service.encode(text) for text in self._limited(texts)], is_batch

    def _limited(self, prompts: list[Any]) -> list[Any]:
        check_limit("the number of prompts", len(prompts), self._settings.max_prompts, "max_prompts")
        return prompts

    async def _values(self, body: GenerateBody, sampling: Sampling) -> dict[str, Any]:
        settings = self._settings
        names = NAMES | {name: name for name in SAME}
        values = {ours: value for name, ours in names.items() if (value := getattr(sampling, name)) is not None}
        values.setdefault("max_tokens", DEFAULT_MAX_NEW_TOKENS)
        check_limit("n", values.get("n", 1), settings.max_n, "max_n")
        check_limit("top_logprobs_num", body.top_logprobs_num or 0, settings.max_logprobs, "max_logprobs")
        stops = values.get("stop", ())
        stops = [stops] if isinstance(stops, str) else stops
        check_limit("the number of stop texts", len(stops), settings.max_stop, "max_stop")
        check_limit("the number of stop ids", len(values.get("stop_token_ids", ())), settings.max_stop, "max_stop")
        check_limit("the length of stop", max(map(len, stops), default=0), settings.max_stop_chars, "max_stop_chars")
        if body.return_logprob:
            values["logprobs"] = body.top_logprobs_num or 0
        elif body.top_logprobs_num:
            raise bad_request("top_logprobs_num is given without return_logprob: true; give both", "top_logprobs_num")
        if body.return_routed_experts:
            values["return_routing"] = True
        if sampling.custom_params is not None and sampling.custom_params.return_top_p_token_ids:
            values["return_support"] = True
        if self._service.tokenizer is None:
            values["detokenize"] = False
        given = [name for name in STRUCTURED if getattr(sampling, name) is not None]
        if len(given) > 1:
            text = f"{' and '.join(given)} both say what the answer must be; give one"
            raise bad_request(text, given[-1], "invalid_structured_output")
        for name in given:
            values["structured"] = await self._fields.wanted(name, {STRUCTURED[name]: getattr(sampling, name)})
        return values

    # ------------------------------------------------------------------ replies

    async def _stream(self, asked: _Asked) -> AsyncGenerator[Any]:
        """None once the call is accepted; then all so far with every event, as SGLang streams."""
        async with self._service.fly(asked.jobs, stream=True, names=asked.names) as flight:
            await flight.taken(min(1.0, self._settings.keep_alive_s))
            yield None
            async for news in flight.updates(self._settings.keep_alive_s):
                if not news:
                    yield None
                for place, output in news.items():
                    yield await self._reply(asked, place, output, output.outputs[0])

    async def _reply(self, asked: _Asked, place: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": asked.names[place],
            "finish_reason": _reason(one),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(one.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "weight_version": str(one.spans[-1].policy_version if one.spans else self._machine.version),
            "version_spans": spans_of(one),
            "e2e_latency": time.monotonic() - asked.began,
        }
        if asked.body.return_logprob:
            meta |= self._logprobs(asked.body, one)
        if asked.body.return_routed_experts and one.routing is not None:
            meta["routed_experts"] = routed_of(one)
        if one.support is not None:
            meta |= support_of(one.support)
        return {"text": one.text, "output_ids": one.token_ids, "meta_info": meta}

    def _logprobs(self, body: GenerateBody, one: CompletionOutput) -> dict[str, Any]:
        """(logprob, token id, text or null) of each token; where asked for, the likeliest ones' beside it."""
        shown = self._token_texts.text if body.return_text_in_logprobs else lambda token: None
        drawn, top = [], []
        for entry in one.logprobs or ():
            likeliest = [(value.logprob, token, shown(token)) for token, value in entry.items()]
            drawn.append(likeliest[0])
            top.append(sorted(likeliest, key=lambda item: -item[0])[: body.top_logprobs_num or 0])
        found: dict[str, Any] = {"output_token_logprobs": drawn, "output_token_logprobs_length": len(drawn)}
        if body.top_logprobs_num:
            found["output_top_logprobs"] = top
        return found


def routed_of(one: CompletionOutput) -> str:
    """int32 [prompt + output - 1, layers, top-k] as base64."""
    return _int32(one.routing)


def support_of(support: TokenSupport) -> dict[str, str]:
    """Of token i: ids[offsets[i] : offsets[i + 1]], all of the vocabulary's where none was cut away."""
    rows = [support.ids_at(position) for position in range(len(support))]
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([np.empty(0, np.int32), *rows])
    return {"top_p_token_ids": _int32(ids), "top_p_token_offsets": _int32(offsets)}


def _int32(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values, np.int32).tobytes()).decode()


def _reason(one: CompletionOutput) -> dict[str, Any] | None:
    if one.finish_reason is None:
        return None
    if one.finish_reason == "length":
        return {"type": "length", "length": len(one.token_ids)}
    if one.finish_reason == "stop":
        return {"type": "stop", "matched": one.stop_reason or (one.token_ids[-1] if one.token_ids else None)}
    return {"type": "abort", "message": f"the request was ended ({one.finish_reason})"}
