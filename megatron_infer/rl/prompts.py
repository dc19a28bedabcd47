"""What may be rolled out: text, token ids, a conversation, or one of them in a mapping with the caller's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.requests.input_processor import is_single_prompt, salt_of

RolloutPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text; ids; chat messages; or a mapping with one of "prompt", "prompt_token_ids", "messages", perhaps "cache_salt" and
"tools" (for the chat template). Its other keys come back as the group's `info`."""

KINDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt that can be served, and how."""

    ids: list[int]
    params: SamplingParams
    salt: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> dict[str, Any]:
        """As the engine takes it."""
        return {"prompt_token_ids": self.ids, "cache_salt": self.salt}


def carrying(params: SamplingParams) -> SamplingParams:
    """The same, with the log probabilities that every sample of a rollout has."""
    return params if params.return_sampled_logprobs else replace(params, return_sampled_logprobs=True)


def is_chat(prompt: object) -> bool:
    """Whether it is one conversation: a list of messages with roles."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def as_batch(prompts: Any) -> list[Any]:
    """One prompt or many -> a list."""
    return [prompts] if is_single_prompt(prompts) or is_chat(prompts) else list(prompts)


def asks_of(
    engine: DynamicInferenceEngine, prompts: Any, params: SamplingParams | Sequence[SamplingParams]
) -> list[Ask]:
    """Check every prompt before any is queued; an error names the place of the prompt."""
    batch = as_batch(prompts)
    if isinstance(params, SamplingParams):
        params = carrying(params)
    if isinstance(params, SamplingParams):
        wanted = [params] * len(batch)
    else:
        wanted = list(params)
        if len(wanted) != len(batch):
            raise InvalidPrompt(
                f"{len(batch)} prompts but {len(wanted)} SamplingParams; pass one, or one for each prompt"
            )
    asks = []
    for index, (prompt, how) in enumerate(zip(batch, wanted, strict=True)):
        try:
            asks.append(ask_of(engine, prompt, how))
        except (InvalidPrompt, ModelError, ValueError) as error:
            if len(batch) > 1:
                error.args = (f"prompt {index}: {error}",)
            raise
    return asks


def ask_of(engine: DynamicInferenceEngine, prompt: Any, params: SamplingParams) -> Ask:
    """One prompt as ids. Raises RequestError when it cannot be served."""
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
    input_processor.check_params(params)
    return Ask(ids=ids, params=carrying(params), salt=salt, info=info)


def chat_ids(
    engine: DynamicInferenceEngine, messages: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """A conversation as the model reads it, up to where its answer begins."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None or not getattr(tokenizer, "has_chat_template", False):
        raise InvalidPrompt("chat messages need a tokenizer with a chat template; give text or token ids")
    options = {} if tools is None else {"tools": tools}
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **options)
    ids: list[int] = tokenizer.encode(text, add_special=False)
    return ids
