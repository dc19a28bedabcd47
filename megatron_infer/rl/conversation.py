"""A conversation of several turns, token in and token out: drawn tokens stay as they are, only new text is tokenised.

prompt ids -> drawn ids -> given ids (a tool's answer) -> drawn ids ...
   mask:         1              0                            1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InferenceError, InvalidPrompt, PromptTooLong, RequestError
from megatron_infer.outputs.token_outputs import values_in
from megatron_infer.rl.prompts import GroupRequest, group_request_of, is_chat
from megatron_infer.rl.samples import SAMPLE_OUTPUTS, RolloutGroup, RolloutSample, checked_groups
from megatron_infer.scheduler.request import VersionSpan

ANSWER = "@@answer-of-the-model@@"
"""Placeholder of the model's answer while a template is rendered around it."""


class ConversationTooLong(PromptTooLong):
    """A conversation that leaves no room for another token; `got` and `limit` are exact."""

    def __init__(self, *, got: int, limit: int, limit_name: str) -> None:
        InferenceError.__init__(
            self,
            f"This model's maximum context length was exceeded: the conversation has {got:,} tokens and wants at least "
            f"one more, limit is {limit:,} ({limit_name}); end it here, add less, or raise the limit",
        )
        self.got, self.limit, self.limit_name = got, limit, limit_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    num_cached_tokens: int
    """Tokens of the conversation before it that were found in the prefix cache."""
    start: int
    """Index of its first token among those that follow the prompt."""


PER_TOKEN = [output for output in SAMPLE_OUTPUTS if not output.per_position]


@dataclass(slots=True)
class _TokenRecord:
    """Per-token data of the tokens that follow the prompt."""

    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=lambda: {output.name: [] for output in PER_TOKEN})
    """By output; of sets of ids, the rows of a TokenSupport."""
    latest: dict[str, Any] = field(default_factory=dict)
    """By output, the value of the latest answer that has one; of positions, the longest."""

    def add_given(self, count: int) -> None:
        self.logprobs += [0.0] * count
        self.mask += [0] * count
        for output in PER_TOKEN:
            self.values[output.name] += [output.given] * count

    def add_drawn(self, sample: RolloutSample) -> None:
        start, length = len(self.mask), len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.mask += [1] * length
        for output in PER_TOKEN:
            value = getattr(sample, output.name)
            self.values[output.name] += [output.given] * length if value is None else output.entries(value)
        for output, value in values_in(sample, SAMPLE_OUTPUTS):
            known = len(self.latest.get(output.name, ())) if output.per_position else 1
            if len(value) >= known:  # one aborted in its prompt has fewer positions
                self.latest[output.name] = value
        for span in sample.spans:
            if not self.spans or self.spans[-1][1:] != span[1:]:
                self.spans.append(span._replace(first_token=start + span.first_token))

    def outputs(self, length: int, num_positions: int) -> dict[str, Any]:
        """The fields of a RolloutSample with the first `length` tokens; sampled log probabilities always."""
        found: dict[str, Any] = {}
        for output in SAMPLE_OUTPUTS:
            name, latest = output.name, self.latest.get(output.name)
            if latest is None and output.asked_by != "return_sampled_logprobs":
                continue
            if output.per_position:
                found[name] = latest[:num_positions]
            else:
                found[name] = output.of_entries(self.values[name][:length], output.vocab_size_of(latest))
        return found


class Conversation:
    """One sequence that grows by turns; knows tokens and templates. `tool_rollouts` draws its answers.

    add_ids, add_text and add_messages append given tokens. Text is tokenised by itself, or after the last token if that
    is a special one, so that no token drawn before changes.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        prompt: Any,
        params: SamplingParams,
        *,
        max_total_tokens: int | None = None,
    ) -> None:
        """prompt: as for `Rollout`. max_total_tokens: prompt, answers and additions; None: the engine's limit."""
        self._request = group_request_of(engine, prompt, replace(params, n=1))
        self._tokenizer: Any = engine.tokenizer
        self.ids: list[int] = list(self._request.ids)
        """The whole conversation."""
        self.turns: list[Turn] = []
        self.info: dict[str, Any] = self._request.info
        ceiling = engine.sizes.max_sequence_length
        self.limit = ceiling if max_total_tokens is None else min(ceiling, max_total_tokens)
        self._limit_name = "max_sequence_length" if self.limit == ceiling else "max_total_tokens"
        chat = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
        self._messages: list[Mapping[str, Any]] | None = list(chat) if is_chat(chat) else None
        self._tools = prompt.get("tools") if isinstance(prompt, Mapping) else None
        self._record = _TokenRecord()

    @property
    def prompt_ids(self) -> list[int]:
        return self._request.ids

    @property
    def room(self) -> int:
        """Tokens that may still be drawn or added."""
        return self.limit - len(self.ids)

    # ------------------------------------------------------------------ given tokens
    def add_ids(self, ids: Sequence[int]) -> None:
        """Append tokens. Raises ConversationTooLong, and appends nothing, if no answer would fit after them."""
        ids = list(ids)
        if len(self.ids) + len(ids) + 1 > self.limit:
            raise ConversationTooLong(got=len(self.ids) + len(ids), limit=self.limit, limit_name=self._limit_name)
        self.ids += ids
        self._record.add_given(len(ids))

    def add_text(self, text: str) -> None:
        """Append a text, without a chat template."""
        self.add_ids(self._ids_of(text))

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append chat messages (a tool's answer, a user's question) and the template's start of the next answer.

        The template is rendered around a placeholder for the latest answer, and the text behind it is appended, without
        the token that ends an answer if the model drew it.
        """
        messages = list(messages)
        if self._messages is None or not self.turns:
            raise InvalidPrompt("add_messages() is for a conversation that began with messages, after an answer")
        if not is_chat(messages):
            raise InvalidPrompt("add_messages() takes a list of {'role': ..., 'content': ...} objects")
        self.add_ids(self._ids_of(self._after_answer(messages)))
        self._messages = [*self._messages, {"role": "assistant", "content": self.turns[-1].text}, *messages]

    def _after_answer(self, messages: list[Mapping[str, Any]]) -> str:
        assert self._messages is not None
        options = {} if self._tools is None else {"tools": self._tools}
        placeholder = {"role": "assistant", "content": ANSWER}
        text = self._tokenizer.apply_chat_template(
            [*self._messages, placeholder, *messages], add_generation_prompt=True, **options
        )
        halves: list[str] = text.split(ANSWER)
        if len(halves) != 2:
            raise InvalidPrompt(
                f"the chat template shows an answer {len(halves) - 1} times, not once; add tokens with add_ids()"
            )
        last = self.turns[-1].token_ids[-1:]
        end = self._tokenizer.token_str(last[0]) if last and last[0] in self._tokenizer.eos_ids else ""
        return halves[1].removeprefix(end)

    def _ids_of(self, text: str) -> list[int]:
        """New text in tokens, tokenised together with the last token if that is a special one."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidPrompt("a text needs a tokenizer and this engine has none; add token ids")
        last = self.ids[-1]
        if last in getattr(tokenizer, "special_ids", ()):
            ids: list[int] = tokenizer.encode(tokenizer.token_str(last) + text, add_special=False)
            if ids[:1] == [last]:
                return ids[1:]
        alone: list[int] = tokenizer.encode(text, add_special=False)
        return alone

    # ------------------------------------------------------------------ answers of the model
    def next_request(self, params: SamplingParams | None = None, *, n: int = 1) -> GroupRequest:
        """The request for the next answer, no longer than there is room for. Raises ConversationTooLong."""
        if self.room < 1:
            raise ConversationTooLong(got=len(self.ids), limit=self.limit, limit_name=self._limit_name)
        params = self._request.params if params is None else params
        most = self.room if params.max_tokens is None else min(params.max_tokens, self.room)
        least = min(params.min_tokens, most)
        params = replace(params, n=n, max_tokens=most, min_tokens=least, return_sampled_logprobs=True)
        return replace(self._request, ids=list(self.ids), params=params)

    def add_answer(self, group: RolloutGroup, index: int = 0) -> Turn:
        """Append sample `index` of the group that `next_request` gave. Raises RolloutError for a failed one."""
        checked_groups([group])
        sample = group.samples[index]
        if group.prompt_ids != self.ids:
            raise RequestError("the answer is to another conversation, or to this one as it stood before")
        turn = Turn(
            token_ids=sample.token_ids,
            text=sample.text,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            num_cached_tokens=group.num_cached_tokens,
            start=len(self._record.mask),
        )
        self._record.add_drawn(sample)
        self.ids += sample.token_ids
        self.turns.append(turn)
        return turn

    def sample(self) -> RolloutSample:
        """The conversation up to its last drawn token, without what was added after that.

        `info["turns"]` lists for each turn its start, number of tokens, finish reason and prefix hits.
        """
        last = self.turns[-1] if self.turns else None
        start, record = len(self.prompt_ids), self._record
        length = max((place + 1 for place, drawn in enumerate(record.mask) if drawn), default=0)
        ids = self.ids[start : start + length]
        return RolloutSample(
            prompt_ids=list(self.prompt_ids),
            token_ids=ids,
            text="" if self._tokenizer is None else self._tokenizer.decode(ids),
            logprobs=record.logprobs[:length],
            spans=[span for span in record.spans if span.first_token < length],
            finish_reason="abort" if last is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
            loss_mask=record.mask[:length],
            **record.outputs(length, max(0, start + length - 1)),
            info={
                "turns": [
                    [turn.start, len(turn.token_ids), turn.finish_reason, turn.num_cached_tokens] for turn in self.turns
                ]
            },
        )
