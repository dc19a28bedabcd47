"""Detokenization of outputs in the HTTP process, so that it costs the engine's step nothing.

The engine detokenizes two kinds of requests itself: those with stop texts, which it matches in the text, and those of
structured output, which may end without a stop token.
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
"""Most new tokens that the event loop detokenizes itself; more at once go to a thread. A token takes half a microsecond
with byte-level vocabularies, and a few with others."""


def without_text(params: SamplingParams) -> SamplingParams:
    """The parameters for the engine of a request that is detokenized here."""
    return replace(params, detokenize=False)


def is_detokenized_here(params: SamplingParams) -> bool:
    """Whether a request's text follows from its tokens alone, exactly as its engine would make it."""
    return not params.detokenize or (not params.stop and params.structured is None)


class _SequenceText:
    """One sequence's text so far."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special=params.skip_special_tokens)
        self._text = ""
        self._ended = False

    def fill(self, output: CompletionOutput) -> None:
        """Set the text of an output, which holds all tokens so far."""
        new = output.token_ids[self.num_tokens :]
        self.num_tokens += len(new)
        if self._detokenizer is None:
            return
        # Without stop texts and grammars, only a stop token ends a sequence with the reason "stop".
        if output.finish_reason == "stop" and not self._include_stop:
            new = new[:-1]
        self._text += self._detokenizer.push(new)
        if output.finish_reason is not None and not self._ended:
            self._ended = True
            self._text += self._detokenizer.flush()
        output.text = self._text


class RequestDetokenizer:
    """The texts of one request's sequences, and of the tokens in its logprobs."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sequences = [_SequenceText(tokenizer, prompt_ids, params) for _ in range(params.n)]
        self._has_filled_prompt = False

    def num_new(self, output: RequestOutput) -> int:
        """How many tokens `fill` has to detokenize."""
        new = 0 if self._has_filled_prompt else len(output.prompt_logprobs or ())
        for one in output.outputs:
            new += len(one.token_ids) - self._sequences[one.index].num_tokens
        return new

    def fill(self, output: RequestOutput) -> None:
        """Set the texts of a cumulative output. Outputs must come in their order; some may be left out."""
        for one in output.outputs:
            sequence = self._sequences[one.index]
            if one.logprobs is not None:
                self._fill_logprobs(one.logprobs[sequence.num_tokens :])
            sequence.fill(one)
        if output.prompt_logprobs is not None and not self._has_filled_prompt:
            self._has_filled_prompt = True
            self._fill_logprobs(entry for entry in output.prompt_logprobs if entry is not None)

    def _fill_logprobs(self, entries: Iterable[dict[int, Logprob]]) -> None:
        token_str = self._tokenizer.token_str
        for entry in entries:
            for token, value in entry.items():
                value.decoded_token = token_str(token)


class OutputDetokenizer:
    """Detokenizes the outputs of calls: a few tokens at once inline, more with `run_in_thread`."""

    def __init__(self, tokenizer: Tokenizer, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._tokenizer, self._run_in_thread = tokenizer, run_in_thread

    def for_request(self, prompt_ids: list[int], params: SamplingParams) -> RequestDetokenizer | None:
        """None: the engine detokenizes the request."""
        return RequestDetokenizer(self._tokenizer, prompt_ids, params) if is_detokenized_here(params) else None

    async def fill(self, outputs: dict[int, RequestOutput], detokenizers: dict[int, RequestDetokenizer]) -> None:
        """Set the texts of a call's new outputs; both by the index of the request in its call."""
        pairs = [(detokenizers[index], output) for index, output in outputs.items() if index in detokenizers]
        if sum([detokenizer.num_new(output) for detokenizer, output in pairs]) <= INLINE_TOKENS:
            _fill_all(pairs)
        else:
            await self._run_in_thread(_fill_all, pairs)


def _fill_all(pairs: list[tuple[RequestDetokenizer, RequestOutput]]) -> None:
    for detokenizer, output in pairs:
        detokenizer.fill(output)
