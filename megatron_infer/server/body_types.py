"""What bodies of several dialects are made of. Types are strict: no text for a number, no unknown field, ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.sampling_params import PENALTIES

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Logit = Annotated[float, Meta(ge=-100.0, le=100.0)]
IdKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Penalty = Annotated[float, Meta(ge=PENALTIES[0], le=PENALTIES[1])]
Count = Annotated[int, Meta(ge=1, le=1024)]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Prompts = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
"""Text, token ids, or a list of either; not a mixture."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A smaller value is scheduled sooner."""
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
NumTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NumTokensOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A number of tokens that may be 0."""
TopCount = Annotated[int, Meta(ge=0, le=100)]
"""How many of the likeliest tokens have log probabilities."""
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0.0)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
ShareOrNone = Annotated[float, Meta(ge=0.0, le=1.0)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A null field counts as not given.

    An attribute has our name of the field, that of SamplingParams or GenerationRequest; where a dialect has another
    name, `msgspec.field(name=...)` says so.
    """


def renamed(body: type[msgspec.Struct]) -> dict[str, str]:
    """Attributes of a body -> the dialect's names of the fields, where these differ."""
    return {one.name: one.encode_name for one in msgspec.structs.fields(body) if one.name != one.encode_name}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the usage so far."""


class CommonSampling(Body):
    """Fields of SamplingParams that servers of open models have."""

    n: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: ShareOrNone | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    logit_bias: dict[IdKey, Logit] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(CommonSampling):
    """Fields of SamplingParams under vLLM's names."""

    allowed_token_ids: TokenIds | None = None
    bad_token_ids: list[TokenId] | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: NumTokensOrNone | None = None
    prompt_logprobs: TopCount | None = None


class OpenAIBody(SamplingFields):
    """Fields that completions and chat completions share."""

    model: str | None = None
    """"" counts as not given."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of logprobs are given as "token_id:5"."""
    cache_salt: ShortText | None = None
    priority: Priority | None = None
    speculate: bool | None = None
    request_id: ShortText | None = None
    """The reply's id behind its prefix, and an id for /abort_requests."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextPart(Body, kw_only=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(Body, kw_only=True, tag_field="type", tag="refusal"):
    """In an assistant message: the text of an answer that was no answer."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(Body, kw_only=True):
    """One message. An assistant message may hold the token ids it was sampled as, see prevent_retokenization."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """"function" is the old name of "tool"."""
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content, which goes before it."""
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: list[TokenId] | None = None
    generation_log_probs: list[float] | None = None
    version_spans: list[Any] | None = None


Messages = Annotated[list[Message], Meta(min_length=1)]
