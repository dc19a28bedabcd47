"""Prompts of rollouts: text, token ids, a conversation, or one of them in a mapping with the caller's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.requests.input_processor import is_single_prompt, salt_of
from megatron_infer.errors import InvalidPrompt

RolloutPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text; ids; chat messages; or a mapping with one of "prompt", "prompt_token_ids", "messages", and optionally
"cache_salt" and "tools" (for the chat template). Its other keys come back as the group's `info`."""

KINDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A checked prompt with its sampling parameters: one request of the engine."""

    ids: list[int]
    params: SamplingParams
    salt: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt as `add_request` takes it."""
        return {"prompt_token_ids": self.ids, "cache_salt": self.salt}


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """The same parameters, with the log probabilities that every sample of a rollout has."""
    return params if params.return_sampled_logprobs else replace(params, return_sampled_logprobs=True)


def is_chat(prompt: object) -> bool:
    """Whether a prompt is one conversation: a list of messages with roles."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def as_batch(prompts: Any) -> list[Any]:
    """One prompt or many -> a list."""
    return [prompts] if is_single_prompt(prompts) or is_chat(prompts) else list(prompts)


def given_batch(prompts: Any) -> list[Any] | None:
    """As `as_batch`; None: none are given."""
    return None if prompts is None else as_batch(prompts)


def group_requests_of(
    engine: DynamicInferenceEngine, prompts: Any, params: SamplingParams | Sequence[SamplingParams]
) -> list[GroupRequest]:
    """Check every prompt before any is queued; an error names the index of the prompt."""
    batch = as_batch(prompts)
    each = [with_logprobs(params)] * len(batch) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(batch):
        raise InvalidPrompt(f"{len(batch)} prompts but {len(each)} SamplingParams; pass one, or one for each prompt")
    requests = []
    for index, (prompt, own) in enumerate(zip(batch, each, strict=True)):
        try:
            requests.append(group_request_of(engine, prompt, own))
        except ValueError as error:
            if len(batch) > 1:
                error.args = (f"prompt {index}: {error}",)
            raise
    return requests


def group_request_of(engine: DynamicInferenceEngine, prompt: Any, params: SamplingParams) -> GroupRequest:
    """One prompt in token ids. Raises RequestError when it cannot be served."""
    info: dict[str, Any] = {}
    salt = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    if isinstance(prompt, Mapping):
        given = [kind for kind in KINDS if kind in prompt]
        if len(given) != 1:
            raise InvalidPrompt(
                f"a mapping prompt has exactly one of {', '.join(map(repr, KINDS))}; got keys "
                f"{sorted(map(str, prompt))}"
            )
        salt, tools = salt_of(prompt), prompt.get("tools")
        info = {key: value for key, value in prompt.items() if key not in (*KINDS, "cache_salt", "tools")}
        prompt = prompt[given[0]]
        if given[0] == "messages" and not is_chat(prompt):
            raise InvalidPrompt("'messages' is a list of {'role': ..., 'content': ...} objects")
    input_processor = engine.input_processor
    if is_chat(prompt):
        prompt = chat_ids(engine, prompt, tools)
    _, ids = input_processor.tokenize(prompt)
    input_processor.check(ids, params)
    return GroupRequest(ids=ids, params=with_logprobs(params), salt=salt, info=info)


def chat_ids(
    engine: DynamicInferenceEngine, messages: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """A conversation in token ids through the chat template, up to where the model's answer begins."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None or not getattr(tokenizer, "has_chat_template", False):
        raise InvalidPrompt("chat messages need a tokenizer with a chat template; give text or token ids")
    options = {} if tools is None else {"tools": tools}
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **options)
    ids: list[int] = tokenizer.encode(text, add_special=False)
    return ids
