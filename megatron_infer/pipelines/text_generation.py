"""Requests of a pipeline: what a caller asks, the context of each while it runs, batches, and what comes back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import DuplicateRequest, InferenceError, InvalidPrompt, RequestError
from megatron_infer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_infer.pipelines.interfaces import GenerateMixin

RequestID = str
ContextT = TypeVar("ContextT")


def check_kind(value: object, kind: type, name: str, remedy: str) -> None:
    """Raise RequestError for an argument of another class."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r:.80} ({type(value).__name__}), it must be {kind.__name__}; {remedy}")


class GenerationStatus(str, Enum):
    """How far a request is."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    """A stop token, a stop text or the end of its grammar."""
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """`TextGenerationOutput.error` says why."""

    @property
    def is_done(self) -> bool:
        return self is not GenerationStatus.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbabilities:
    """Log probabilities of consecutive tokens."""

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]
    """Token id -> log probability; each has the token itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGenerationRequest:
    """What a caller asks."""

    prompt: str | Sequence[int] | None = None
    """Text or token ids."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A conversation, in place of a prompt; needs the model's chat template."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: RequestID = field(default_factory=lambda: uuid.uuid4().hex)
    """On several ranks it must be given, the same on each."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidPrompt("a TextGenerationRequest has exactly one of prompt and messages")
        remedy = "SamplingParams(max_tokens=16) is one"
        check_kind(self.sampling_params, SamplingParams, "sampling_params", remedy)


@dataclass(eq=False, slots=True, kw_only=True)
class TextContext:
    """One sequence while it is generated: its tokens, and how many of them are computed."""

    request_id: RequestID
    tokens: list[int]
    """Prompt and what was drawn."""
    prompt_len: int
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    """Ids that end it: its own set, which no other context shares."""
    max_length: int | None = None
    """Tokens at which it ends; None: the model's limit."""
    start: int = 0
    """Tokens whose keys and values are in the cache; kept by a loop by hand, not by a pipeline's `execute`."""
    status: GenerationStatus = GenerationStatus.ACTIVE

    @property
    def is_done(self) -> bool:
        return self.status.is_done

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def active_length(self) -> int:
        """Tokens that the next step computes."""
        return len(self.tokens) - self.start

    @property
    def next_tokens(self) -> Tensor:
        """int64: the tokens that the next step computes."""
        return torch.tensor(self.tokens[self.start :], dtype=torch.int64)

    def update(self, token: int) -> None:
        """A loop by hand has computed all tokens and drawn the next. Does nothing once the sequence has ended."""
        if self.is_done:
            return
        self.start = len(self.tokens)
        self.tokens.append(token)
        if token in self.eos_ids and len(self.generated) > self.params.min_tokens:
            self.status = GenerationStatus.END_OF_SEQUENCE
        elif self.max_length is not None and len(self.tokens) >= self.max_length:
            self.status = GenerationStatus.MAXIMUM_LENGTH

    def skip_processing(self, num_tokens: int) -> None:
        """Tokens found in the prefix cache need no computation; at least one is left."""
        assert self.start + num_tokens < len(self.tokens), f"{num_tokens} of {self.active_length} tokens skipped"
        self.start += num_tokens


@dataclass(frozen=True, slots=True)
class TextGenerationInputs(Generic[ContextT]):
    """The requests that one `execute` runs, in batches, one for each replica."""

    batches: Sequence[Sequence[ContextT]]

    @classmethod
    def of(cls, contexts: Sequence[ContextT]) -> TextGenerationInputs[ContextT]:
        """One batch."""
        if isinstance(contexts, TextContext):
            raise RequestError("TextGenerationInputs.of takes a list of contexts; write of([context])")
        return cls([list(contexts)])

    @classmethod
    def empty(cls) -> TextGenerationInputs[ContextT]:
        """Nothing to run: outputs of the batch before are read."""
        return cls([])

    @property
    def flat_batch(self) -> list[ContextT]:
        return [context for batch in self.batches for context in batch]

    def __bool__(self) -> bool:
        return any(self.batches)


@dataclass(slots=True, kw_only=True)
class TextGenerationOutput:
    """What is new of a request; of `generate`, all of it."""

    request_id: RequestID
    tokens: list[int]
    text: str
    """The tokens' text, "" without a tokenizer. An end that can begin a longer character or a stop text comes later."""
    final_status: GenerationStatus
    log_probabilities: LogProbabilities | None = None
    """With SamplingParams.logprobs."""
    prompt_log_probabilities: LogProbabilities | None = None
    """With SamplingParams.prompt_logprobs, in the first output: of the prompt's tokens but the first."""
    error: InferenceError | None = None

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done

    def extend(self, news: TextGenerationOutput) -> None:
        """Append what came later."""
        self.tokens += news.tokens
        self.text += news.text
        self.final_status, self.error = news.final_status, news.error
        if news.log_probabilities is not None:
            mine = self.log_probabilities or LogProbabilities(token_log_probabilities=[], top_log_probabilities=[])
            self.log_probabilities = LogProbabilities(
                token_log_probabilities=[
                    *mine.token_log_probabilities,
                    *news.log_probabilities.token_log_probabilities,
                ],
                top_log_probabilities=[*mine.top_log_probabilities, *news.log_probabilities.top_log_probabilities],
            )


class TextTokenizer:
    """A model's tokenizer, which also makes the contexts of requests."""

    def __init__(self, model: str | Tokenizer, *, max_length: int | None = None) -> None:
        """model: as for `LLM`, or a tokenizer itself. max_length: of every sequence; None: the model's."""
        self.delegate = model if isinstance(model, Tokenizer) else _tokenizer_of(model)
        self.max_length = max_length

    @property
    def eos(self) -> int:
        """The first id that ends a text. Raises ValueError if there is none."""
        if not self.delegate.eos_ids:
            raise ValueError(f"{self.delegate.name or 'this tokenizer'} has no end-of-sequence id")
        return self.delegate.eos_ids[0]

    def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids, int64."""
        ids = self.delegate.encode(prompt, add_special=add_special_tokens) if isinstance(prompt, str) else list(prompt)
        encoded: np.ndarray = np.asarray(ids, dtype=np.int64)
        return encoded

    def decode(self, encoded: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.delegate.decode([int(one) for one in encoded], skip_special=skip_special_tokens)

    def new_context(self, request: TextGenerationRequest) -> TextContext:
        """The context of a request. Raises RequestError for one that cannot be served."""
        params = request.sampling_params
        if params.n != 1:
            raise RequestError(f"a context is one sequence, n is {params.n}; ask in several requests")
        if request.messages is not None:
            text = self.delegate.apply_chat_template(request.messages)
            ids = self.encode(text, add_special_tokens=False).tolist()
        else:
            assert request.prompt is not None
            ids = self.encode(request.prompt).tolist()
        if not ids:
            raise InvalidPrompt("prompt is empty (0 tokens); give at least one token")
        lengths = [self.max_length, None if params.max_tokens is None else len(ids) + params.max_tokens]
        known = [length for length in lengths if length is not None]
        return TextContext(
            request_id=request.request_id,
            tokens=ids,
            prompt_len=len(ids),
            params=params,
            eos_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else frozenset(self.delegate.eos_ids)),
            max_length=min(known, default=None),
        )


def _tokenizer_of(model: str) -> Tokenizer:
    from megatron_infer.models.loading.sources import open_tokenizer

    return open_tokenizer(model)


class GenerationLoop:
    """Runs prompts through a pipeline's `execute`; leaving it releases all of them."""

    def __init__(self, pipeline: GenerateMixin[Any, Any], prompts: Any) -> None:
        """prompts: one TextGenerationRequest, or several."""
        requests = [prompts] if isinstance(prompts, TextGenerationRequest | str) else list(prompts)
        for request in requests:
            remedy = 'TextGenerationRequest(prompt="Hello") is one'
            check_kind(request, TextGenerationRequest, "one of the prompts", remedy)
        if len({request.request_id for request in requests}) < len(requests):
            raise RequestError("two of the requests have the same request_id; each needs its own")
        for request in requests:
            if any(manager.contains(request.request_id) for manager in pipeline.kv_managers):
                raise DuplicateRequest(
                    f"request id {request.request_id!r} is that of a request under way; give each its own id"
                )
        self._pipeline = pipeline
        self._contexts = [pipeline.tokenizer.new_context(request) for request in requests]
        self._unfinished = {context.request_id: context for context in self._contexts}
        """Those whose last output was not seen: another caller's step may have ended them already."""
        self._outputs: dict[RequestID, TextGenerationOutput] = {}

    @property
    def is_running(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> list[TextGenerationOutput]:
        """One `execute` of what is unfinished -> what is new."""
        news = list(self._pipeline.execute_own(list(self._unfinished.values())).values())
        for output in news:
            if output.request_id in self._outputs:
                self._outputs[output.request_id].extend(output)
            else:
                self._outputs[output.request_id] = replace(output, tokens=list(output.tokens))
            if output.is_done:
                del self._unfinished[output.request_id]
        for context in [one for one in self._unfinished.values() if one.is_done]:  # ended without an output: cancelled
            del self._unfinished[context.request_id]
            end = TextGenerationOutput(request_id=context.request_id, tokens=[], text="", final_status=context.status)
            if (before := self._outputs.get(context.request_id)) is None:
                self._outputs[context.request_id] = replace(end)
            else:
                before.extend(end)
            news.append(end)
        return news

    def outputs(self) -> list[TextGenerationOutput]:
        """All of each request, in order."""
        return [self._outputs[context.request_id] for context in self._contexts]

    def __enter__(self) -> GenerationLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for context in self._contexts:
            self._pipeline.release(context.request_id)
