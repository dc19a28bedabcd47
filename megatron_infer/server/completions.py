"""/v1/completions: continues texts, token ids or lists of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.body_types import Count, NumTokensOrNone, OpenAIBody, Prompts, ShareOrNone, TopCount
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import SHARED, STREAM_OPTIONS
from megatron_infer.server.generation import Dialect, Generator, PreparedCall
from megatron_infer.server.generation_request import GenerationRequest, check_limit, sampling_of
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused
from megatron_infer.server.openai_logprobs import Entry, by_id, completion_logprobs
from megatron_infer.server.reply_format import Delta, OpenAIReply, sampled_logprobs, version_spans_of, whole_delta
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.server_config import ServerConfig

ROUTE = "completions"
KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
_CHAT_ONLY = "tool calls are served at /v1/chat/completions and /v1/responses only"
FIELDS = FieldTable(
    SHARED
    | {
        "tools functions": refused(_CHAT_ONLY, []),
        "tool_choice function_call": refused(_CHAT_ONLY, "none"),
        "parallel_tool_calls": no_effect(_CHAT_ONLY),
        "reasoning_effort": refused("a text has no chat template that could read it"),
        "add_BOS": refused("texts begin with the tokenizer's special tokens; see add_special_tokens", False),
    },
    {"stream_options": STREAM_OPTIONS},
)


class CompletionBody(OpenAIBody, kw_only=True):
    prompt: Prompts
    max_tokens: NumTokensOrNone | None = None
    echo: bool | None = None
    logprobs: TopCount | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None


class MegatronCompletionBody(CompletionBody, kw_only=True):
    """At /completions, as of megatron-core's server: top_p 0 sets no limit."""

    top_p: ShareOrNone | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    async def read(body: CompletionBody, call: Call) -> GenerationRequest:
        check_limit("best_of", body.best_of or 1, settings.max_n, "max_n")
        return GenerationRequest.of(body, call, sampling=_sampling_of(body), prompt_bytes=_prompt_bytes(body))

    dialect = Dialect(
        bodies={
            "/v1/completions": partial(routes.fields.extend, ROUTE, CompletionBody),
            "/completions": partial(routes.fields.extend, ROUTE, MegatronCompletionBody),
        },
        summary="Continue texts or token ids",
        fields=FIELDS,
        read=read,
        reply=CompletionReply,
        module_fields=ROUTE,
    )
    Generator(routes, client).register(routes.add, dialect, statuses=GENERATION_STATUSES)


def _sampling_of(body: CompletionBody) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ApiError 400 for fields that contradict each other."""
    values = sampling_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0, which gives something with echo: true only; give 1 or more", "max_tokens")
    if body.max_tokens == 0 and (body.min_tokens or 0) > 0:
        raise bad_request("min_tokens is more than max_tokens, which is 0", "min_tokens")
    # For 0 the engine samples one token, which the reply leaves out.
    values["max_tokens"] = max(1, values.get("max_tokens", DEFAULT_MAX_TOKENS))
    if body.logprobs is not None and body.echo:
        if body.stream:
            raise bad_request("echo with logprobs comes with whole replies only; give no stream: true", "echo")
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    number = body.n or 1
    if (body.best_of or number) < number:
        raise bad_request(f"best_of is {body.best_of}, less than n, which is {number}", "best_of")
    if body.best_of is not None and body.best_of > number:
        if body.stream:
            raise bad_request("best_of needs whole samples to choose from; give no stream: true", "best_of")
        values["n"] = body.best_of
        values.setdefault("logprobs", 0)
    return values


def _prompt_bytes(body: CompletionBody) -> Callable[[int, int], float]:
    a_token = call_limits.logprob_bytes(body.prompt_logprobs)
    if body.echo:
        a_token += call_limits.logprob_bytes(body.logprobs)
    if body.return_token_ids:
        a_token += call_limits.NUMBER_BYTES
    return lambda place, num_tokens: num_tokens * a_token


class CompletionReply(OpenAIReply):
    def __init__(self, prepared: PreparedCall) -> None:
        self._body: CompletionBody = prepared.body
        super().__init__(prepared, prefix="cmpl", chunk_kind=KIND, hides_output=self._body.max_tokens == 0)
        self._echoed = prepared.prompt_texts
        self._num_sequences = prepared.requests[0].params.n
        self._offsets = [0] * (len(prepared.requests) * self._num_sequences)
        """Of each choice of a stream: the `text_offset` of its next token."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for place, output in enumerate(outputs):
            for one in _best(output.outputs, self._body.n or 1):
                echoed = self._echoed[place] if self._echoed else ""
                choices.append(self._choice(len(choices), output, one, whole_delta(one), echoed))
        return {**self.head(KIND), "choices": choices, "usage": self.usage(outputs)}

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index, text in enumerate(text for text in self._echoed for _ in range(self._num_sequences)):
            yield self.chunk(_plain_choice(index, text))

    def chunks(
        self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta
    ) -> Iterator[dict[str, Any]]:
        place = index * self._num_sequences + one.index
        choice = self._choice(place, output, one, delta, offset=self._offsets[place])
        if choice["logprobs"] is not None:
            self._offsets[place] += sum(map(len, choice["logprobs"]["tokens"]))
        yield self.chunk(choice)

    def _choice(
        self,
        index: int,
        output: RequestOutput,
        one: CompletionOutput,
        delta: Delta,
        echoed: str = "",
        *,
        offset: int = 0,
    ) -> dict[str, Any]:
        """delta: what the choice shows of the sequence, all of it in a whole reply. offset: of the first token."""
        body = self._body
        if self.hides_output:
            delta = delta.without_output()
        choice = _plain_choice(index, echoed + delta.text)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if body.logprobs is not None and delta.logprobs is not None:
            ids = delta.token_ids
            entries: list[Entry] = [*delta.logprobs]
            if body.echo:
                ids = [*output.prompt_token_ids, *ids]
                entries = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *entries]
            choice["logprobs"] = completion_logprobs(
                ids, entries, self.token_texts, num_top=body.logprobs, offset=offset
            )
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_id(output.prompt_logprobs)
        if body.return_token_ids:
            prompt = output.prompt_token_ids if delta.is_first else None
            choice |= _token_fields(prompt, delta.token_ids, delta.logprobs)
            if delta.finish_reason is not None:
                choice |= {"weight_version": self.weight_version(one), "version_spans": version_spans_of(one)}
        return choice


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _token_fields(
    prompt: list[int] | None, tokens: list[int], entries: Sequence[dict[int, Logprob]] | None
) -> dict[str, Any]:
    """Token ids and logprobs under both names that RL clients read."""
    fields: dict[str, Any] = {"token_ids": tokens, "generation_token_ids": tokens}
    if prompt is not None:
        fields["prompt_token_ids"] = prompt
    if entries is not None:
        fields["generation_log_probs"] = sampled_logprobs(entries)
    return fields


def _best(outputs: list[CompletionOutput], number: int) -> list[CompletionOutput]:
    """`number` sequences, those with the largest cumulative logprob first where there are more."""
    if len(outputs) == number:
        return outputs
    return sorted(outputs, key=lambda one: -(one.cumulative_logprob or 0.0))[:number]
