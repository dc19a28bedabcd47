"""Texts of outputs, made of their token ids in the server's process: an engine's step is not kept by them.

Two kinds of requests have theirs made by the engine: those with stop texts, which it looks for in the text, and those
of structured output, which may end without a token that says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.text.detokenizer import IncrementalDetokenizer
from megatron_infer.text.tokenizer import Tokenizer

INLINE_TOKENS = 64
"""New tokens at most whose text the event loop makes itself; more at once go to a thread. A token takes half a
microsecond with byte-level vocabularies, and a few with others."""


def without_text(params: SamplingParams) -> SamplingParams:
    """What an engine is asked for when the text is made here; for requests that `made_here` names."""
    return replace(params, detokenize=False)


def made_here(params: SamplingParams) -> bool:
    """Whether a request's text can be made of its tokens alone, exactly as its engine would make it."""
    return not params.detokenize or (not params.stop and params.structured is None)


class _SampleText:
    """One sample's text so far."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams) -> None:
        self.num_seen = 0
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special=params.skip_special_tokens)
        self._text = ""
        self._ended = False

    def take(self, one: CompletionOutput) -> None:
        """Give an output, which has all of its tokens, its text."""
        new = one.token_ids[self.num_seen :]
        self.num_seen += len(new)
        if self._detokenizer is None:
            return
        # Without stop texts and grammars, a token that may end the text is what has.
        if one.finish_reason == "stop" and not self._shows_stop:
            new = new[:-1]
        self._text += self._detokenizer.push(new)
        if one.finish_reason is not None and not self._ended:
            self._ended = True
            self._text += self._detokenizer.flush()
        one.text = self._text


class RequestTexts:
    """The texts of one request's samples, and of the tokens beside their log probabilities."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._samples = [_SampleText(tokenizer, prompt_ids, params) for _ in range(params.n)]
        self._told_prompt = False

    def num_new(self, output: RequestOutput) -> int:
        """How many tokens `fill` has to turn into text."""
        new = sum(len(one.token_ids) - self._samples[one.index].num_seen for one in output.outputs)
        return new if self._told_prompt else new + len(output.prompt_logprobs or ())

    def fill(self, output: RequestOutput) -> None:
        """Put into an output of all so far what its engine left out. Outputs come in their order."""
        for one in output.outputs:
            sample = self._samples[one.index]
            if one.logprobs is not None:
                self._name(one.logprobs[sample.num_seen :])
            sample.take(one)
        if output.prompt_logprobs is not None and not self._told_prompt:
            self._told_prompt = True
            self._name(entry for entry in output.prompt_logprobs if entry is not None)

    def _name(self, entries: Iterable[dict[int, Logprob]]) -> None:
        token_str = self._tokenizer.token_str
        for entry in entries:
            for token, value in entry.items():
                value.decoded_token = token_str(token)


class Texts:
    """Makes the texts of requests, small pieces at once and larger ones with `off_loop`."""

    def __init__(self, tokenizer: Tokenizer, off_loop: Callable[..., Awaitable[Any]]) -> None:
        self._tokenizer, self._off_loop = tokenizer, off_loop

    def of(self, prompt_ids: list[int], params: SamplingParams) -> RequestTexts | None:
        """None: the engine makes them."""
        return RequestTexts(self._tokenizer, prompt_ids, params) if made_here(params) else None

    async def fill(self, news: dict[int, RequestOutput], texts: dict[int, RequestTexts]) -> None:
        """The outputs of a call that have news, and who makes their texts, by the places of their jobs."""
        pairs = [(texts[place], output) for place, output in news.items() if place in texts]
        if sum(maker.num_new(output) for maker, output in pairs) <= INLINE_TOKENS:
            _fill_all(pairs)
        else:
            await self._off_loop(_fill_all, pairs)


def _fill_all(pairs: list[tuple[RequestTexts, RequestOutput]]) -> None:
    for maker, output in pairs:
        maker.fill(output)
