"""What a call may ask for: limits on its prompts and on its reply, checked before anything is computed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.peers import caller_share
from megatron_infer.server.http_errors import ApiError, bad_request, context_overflow
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.chat_template import RenderLimits
from megatron_infer.text.tokenizer import Tokenizer

TOKEN_BYTES = 32
"""Bytes of a reply for a token: its text, its id."""
LOGPROB_BYTES = 100
"""Bytes of a reply for one log probability with its token's text and bytes."""
NUMBER_BYTES = 8
"""Bytes of a reply for one token id in a list."""
FLOAT_BYTES = 24
"""Bytes of a reply for one number of a vector, as text."""
ID_BYTES = 16 / 3
"""Bytes of a reply for one token id as base64 of int32."""
RENDER_CPU_S = 1.0
"""Most seconds of a thread to render a chat template; a long conversation takes some milliseconds."""
PIECE_CHARS, PIECE_LIMITS = 8, 2
"""A text is refused when its first PIECE_CHARS * limit characters give more than PIECE_LIMITS * limit tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the engines, the smallest of all replicas', and what adapters there are."""

    max_length: int
    """Tokens of prompt and output together."""
    vocab_size: int
    num_at_once: int
    """Requests that the replicas take together, computed or next in line there."""
    max_queue: int
    """Requests that may wait at the coordinator."""
    hidden_size: int
    """Numbers in a vector of an embedding."""
    num_routed: int
    """Experts that a token is routed to, of all layers together."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that a replica has, or is about to have."""

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> EngineLimits | None:
        """From a coordinator's report; None: no replica is there."""
        limits = [replica["limits"] for replica in stats["replicas"] if replica["limits"]]
        if not limits:
            return None
        return cls(
            max_length=min(one["max_sequence_length"] for one in limits),
            vocab_size=min(one["vocab_size"] for one in limits),
            num_at_once=sum(replica["limit"] for replica in stats["replicas"]),
            max_queue=stats["max_queue"],
            hidden_size=max(one.get("hidden_size", 0) for one in limits),
            num_routed=max(one.get("num_routed", 0) for one in limits),
            adapters=tuple(sorted({name for one in stats["replicas"] for name in one["adapters"]})),
        )

    def rendering(self, tokenizer: Tokenizer) -> RenderLimits:
        """The limits of rendering a chat template: its text has to fit."""
        return RenderLimits(max_chars=self.max_length * tokenizer.longest_token, cpu_s=RENDER_CPU_S)


def check_num_chars(num_chars: int, limits: EngineLimits, tokenizer: Tokenizer, *, field: str) -> None:
    """Raises ApiError 400 for a text that cannot fit, whatever its tokens are."""
    longest = limits.max_length * tokenizer.longest_token
    if num_chars > longest:
        message = (
            f"This model's maximum context length is {limits.max_length:,} tokens, which {longest:,} characters can "
            f"fill at most. However, your prompt has {num_chars:,} characters. Shorten it."
        )
        raise bad_request(message, field, "context_length_exceeded")


def encode_within(
    tokenizer: Tokenizer, text: str, limits: EngineLimits, *, field: str = "prompt", add_special: bool = True
) -> list[int]:
    """Token ids of a text that may be long.

    Raises ApiError 400, before the whole of it is tokenized, for one far beyond the context length.
    """
    check_num_chars(len(text), limits, tokenizer, field=field)
    end = PIECE_CHARS * limits.max_length
    if len(text) > end:
        num_tokens = len(tokenizer.encode(text[:end], add_special=False))
        if num_tokens > PIECE_LIMITS * limits.max_length:
            message = (
                f"This model's maximum context length is {limits.max_length:,} tokens. However, the first {end:,} of "
                f"your prompt's {len(text):,} characters are {num_tokens:,} tokens. Shorten it."
            )
            raise bad_request(message, field, "context_length_exceeded")
    return tokenizer.encode(text, add_special=add_special)


def check_num_prompts(count: int, settings: ServerConfig, *, field: str) -> None:
    """Raises ApiError 400 for more prompts than a call may hold."""
    limit = settings.max_prompts
    if count > limit:
        raise bad_request(f"{field} holds {count:,} prompts, the limit is {limit:,} (max_prompts)", field)


def check_num_tokens(count: int, limits: EngineLimits, *, field: str) -> None:
    """Raises ApiError 400 for more token ids than a request may hold."""
    if count >= limits.max_length:
        raise context_overflow(limits.max_length, count, 1, field=field)


def check_num_ids(params: SamplingParams, limits: EngineLimits) -> None:
    """Raises ApiError 400 for a list of more token ids than there are."""
    for name in ("allowed_token_ids", "bad_token_ids"):
        ids = getattr(params, name) or ()
        if len(ids) > limits.vocab_size:
            message = f"{name} has {len(ids):,} ids, the vocabulary has {limits.vocab_size:,}; give each once"
            raise bad_request(message, name)


def check_enabled(params: SamplingParams, settings: ServerConfig) -> None:
    """Raises ApiError 400 for what an option of the server turns off."""
    if (off := settings.turned_off(params)) is not None:
        what = f"{off.what} (echo with logprobs)" if off.option == "enable_echo" else off.what
        raise turned_off(what, off.option, "structured output" if off.name == "structured" else off.name)


def turned_off(what: str, option: str, name: str) -> ApiError:
    """The error of a call that asks, in the field `name`, for what `option` turns off."""
    return bad_request(f"{what}: this server takes no such calls ({option} is false); leave it out", name)


def check_prompt(ids: Sequence[int], max_tokens: int | None, limits: EngineLimits, *, field: str) -> None:
    """Raises ApiError 400 for token ids that the engines would refuse."""
    num_prompt = len(ids)
    if num_prompt == 0:
        raise bad_request("the prompt is empty (0 tokens); give at least one", field, "empty_prompt")
    if num_prompt + (max_tokens or 1) > limits.max_length:
        raise context_overflow(limits.max_length, num_prompt, max_tokens or 1, field=field)
    check_ids(ids, limits, field=field)


def check_ids(ids: Sequence[int], limits: EngineLimits, *, field: str) -> None:
    """Raises ApiError 400 for token ids outside the vocabulary."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        message = f"token id {wrong} is outside the vocabulary (0 to {limits.vocab_size - 1})"
        raise bad_request(message, field, "invalid_token_id")


def check_num_requests(count: int, limits: EngineLimits, *, field: str) -> None:
    """Raises ApiError 400 for a call whose requests cannot all be taken, however idle the engines are."""
    share = caller_share(limits.max_queue)
    most = limits.num_at_once + share
    if count > most:
        message = (
            f"{field} holds {count:,} prompts, and at most {most:,} can be under way ({limits.num_at_once:,} at the "
            f"engines, {share:,} waiting: a caller's share of max_queue, {limits.max_queue:,}); send several calls"
        )
        raise bad_request(message, field, "too_many_prompts")


def within_reply(
    requests: Sequence[EngineRequest], limits: EngineLimits, max_reply_bytes: int
) -> Sequence[EngineRequest]:
    """The requests, with a max_tokens for those that leave it open where the reply could grow beyond the limit.

    Raises ApiError 400 for a call whose reply is larger if its requests draw the tokens that they ask for.
    """
    least = reply_bytes(requests, limits)
    if least > max_reply_bytes:
        message = (
            f"the reply may have {least:,.0f} bytes (n x prompts and max_tokens x text, ids, log probabilities, "
            f"experts or vectors per token), the limit is {max_reply_bytes:,} (max_reply_bytes); ask for less at once"
        )
        raise bad_request(message, "max_tokens", "reply_too_large")
    open_ended = [one for one in requests if one.params.max_tokens is None]
    if not open_ended:
        return requests
    share = (max_reply_bytes - least) / len(open_ended)

    def bounded(request: EngineRequest) -> EngineRequest:
        params = request.params
        most = 1 + int(share / (params.n * _bytes_a_token(request, limits)))
        if params.max_tokens is not None or most >= limits.max_length - len(request.prompt_ids):
            return request
        return replace(request, params=replace(params, max_tokens=max(most, params.min_tokens)))

    return [bounded(one) for one in requests]


def reply_bytes(requests: Sequence[EngineRequest], limits: EngineLimits) -> float:
    """Bytes of a reply whose requests draw the tokens that they ask for, one where they do not say."""
    return sum(
        _prompt_bytes(one, limits) + one.params.n * (one.params.max_tokens or 1) * _bytes_a_token(one, limits)
        for one in requests
    )


def _prompt_bytes(request: EngineRequest, limits: EngineLimits) -> float:
    params, num_tokens = request.params, len(request.prompt_ids)
    if params.pooling is not None:
        return (num_tokens if params.pooling == "all" else 1) * limits.hidden_size * FLOAT_BYTES
    routed = params.n * num_tokens * limits.num_routed * ID_BYTES if params.return_routing else 0.0
    if request.prompt_bytes is not None:
        return routed + params.n * request.prompt_bytes
    return routed + num_tokens * logprob_bytes(params.prompt_logprobs)


def logprob_bytes(num_top: int | None) -> int:
    """Bytes of a reply for a token's log probabilities. num_top: of the likeliest tokens; None: of none."""
    return 0 if num_top is None else (num_top + 1) * LOGPROB_BYTES


def text_bytes(text: str) -> int:
    """Bytes of a text in a reply."""
    return len(msgspec.json.encode(text)) - 2


def _bytes_a_token(request: EngineRequest, limits: EngineLimits) -> float:
    params = request.params
    num_bytes = TOKEN_BYTES + request.token_bytes + logprob_bytes(params.logprobs)
    if params.return_routing:
        num_bytes += limits.num_routed * ID_BYTES
    if params.return_support and not params.greedy:
        if params.top_k > 0:
            num_bytes += params.top_k * ID_BYTES
        elif params.top_p == 1.0 and params.min_p == 0.0:  # else few of the vocabulary are left, which is not known yet
            num_bytes += limits.vocab_size * ID_BYTES
    return num_bytes
