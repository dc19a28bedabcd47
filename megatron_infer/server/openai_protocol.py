"""Request bodies of the OpenAI routes. Types are strict: no text for a number, no unknown field, bounded ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.sampling_params import PENALTIES, SamplingParams

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Logit = Annotated[float, Meta(ge=-100.0, le=100.0)]
IdKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Penalty = Annotated[float, Meta(ge=PENALTIES[0], le=PENALTIES[1])]
Count = Annotated[int, Meta(ge=1, le=1024)]
Text = Annotated[str, Meta(min_length=1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A smaller value is scheduled sooner."""
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A null field counts as not given."""


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the usage so far."""


class SamplingFields(Body):
    """Fields of SamplingParams that routes share, under vLLM's names."""

    n: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    logit_bias: dict[IdKey, Logit] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: list[TokenId] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None


class SamplingBody(SamplingFields):
    """Fields that completions and chat completions share."""

    model: str | None = None
    """"" counts as not given."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of logprobs are given as "token_id:5"."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Priority | None = None
    speculate: bool | None = None
    request_id: RequestId | None = None
    """The reply's id behind its prefix, and an id for /abort_requests."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None


SAMPLING_FIELDS = tuple(name for name in SamplingBody.__struct_fields__ if name in SamplingParams.__dataclass_fields__)
"""Fields of `SamplingBody` that SamplingParams has under the same name."""


class CompletionBody(SamplingBody, kw_only=True):
    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
    """Text, token ids, or a list of either; not a mixture."""
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None


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


class ChatBody(SamplingBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template; without effect where the template does not read it."""
    documents: list[dict[str, Any]] | None = None
    """A variable of the chat template; without effect where the template does not read it."""
    include_reasoning: bool | None = None
    """False: the reply leaves out reasoning, where the server separates it."""
    prevent_retokenization: bool | None = None
    return_tokenized_data: bool | None = None
    return_raw_text: bool | None = None
    """Each message has raw_text: the prompt as text with its special tokens, and the answer behind it."""
    add_BOS: bool | None = None
    """True: the prompt begins with one BOS token; False: with none; not given: as the chat template writes it."""


class MegatronCompletionBody(CompletionBody, kw_only=True):
    """At /completions, as of megatron-core's server: top_p 0 sets no limit."""

    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class MegatronChatBody(ChatBody, kw_only=True):
    """At /chat/completions, as of megatron-core's server: top_p 0 sets no limit."""

    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
