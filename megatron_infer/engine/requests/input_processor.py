"""Turns what a caller passes into requests that the scheduler can run; raises before any state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.request_metadata import check_metadata
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InvalidPrompt, PromptTooLong, RequestError, UnknownAdapter, unknown_name
from megatron_infer.runner.sampling.grammar_matchers import Grammars
from megatron_infer.runner.sampling.rng import derive_seed
from megatron_infer.scheduler.request import CacheUse, Request

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids", and perhaps "cache_salt"."""

MAX_SALT_CHARS = 256


class TextCodec(Protocol):
    """The part of a tokenizer that requests and outputs use."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_str(self, token_id: int) -> str: ...


class InputProcessor:
    """Validates prompts and parameters and builds Requests; deterministic in (engine seed, order of calls)."""

    def __init__(
        self,
        config: InferenceConfig,
        sizes: ResolvedSizes,
        *,
        vocab_size: int,
        tokenizer: TextCodec | None,
        eos_ids: Sequence[int],
        seed: int,
        unavailable: Mapping[str, str],
        adapters: Mapping[str, tuple[int, str]] | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self.sizes = sizes
        self.vocab_size = vocab_size
        self.unavailable = unavailable
        """Parameters that the model cannot serve -> why not, and what to do."""
        self.adapters = adapters
        """The LoRA adapters that are loaded, live -> (version, hash of the content); None: the engine has none."""
        self.capacity = sizes.num_usable_blocks * config.block_size_tokens + 1  # the last drawn token is never stored
        """Most tokens of a sequence for which the pool has room."""
        self._eos_ids = frozenset(id for id in eos_ids if 0 <= id < vocab_size)  # others are never drawn
        self.grammars = Grammars(tokenizer, vocab_size)
        self.num_seeds = 0
        """Seeds derived so far: the next unseeded request takes the one after."""
        self.num_ids = 0
        self._num_own_seeds = 0

    def new_id(self, taken: Callable[[str], bool]) -> str:
        """An id for a request without one: the next number that is not taken."""
        while True:
            name, self.num_ids = str(self.num_ids), self.num_ids + 1
            if not taken(name):
                return name

    def next_seed(self) -> int:
        """The seed of the next request that has none."""
        self.num_seeds += 1
        return derive_seed(self._seed, self.num_seeds)

    def own_seed(self, rank: int) -> int:
        """A seed for the next unseeded request of a rank other than the leader: a function of its own requests."""
        self._num_own_seeds += 1
        return derive_seed(self._seed, (rank << 48) + self._num_own_seeds)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of any accepted prompt form."""
        if isinstance(prompt, Mapping):
            prompt = _from_mapping(prompt)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidPrompt("a text prompt needs a tokenizer and this engine has none; pass token ids")
            text, ids = prompt, self._tokenizer.encode(prompt)
        else:
            text, ids = None, _as_ids(prompt)
        if not ids:
            raise InvalidPrompt("prompt is empty (0 tokens); give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidPrompt(f"token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return text, ids

    def check(self, ids: Sequence[int], params: SamplingParams) -> int:
        """The length at which a sequence that begins with `ids` ends. Raises if it cannot be served.

        Waits for a grammar that is not compiled yet.
        """
        max_total = self._max_total(len(ids), params.max_tokens)
        self.check_params(params)
        return max_total

    def _max_total(self, num_prompt: int, max_tokens: int | None) -> int:
        sizes, capacity = self.sizes, self.capacity
        blocks = f"{sizes.num_usable_blocks} blocks of {self._config.block_size_tokens}"
        if num_prompt + 1 > sizes.max_sequence_length:
            raise PromptTooLong(
                got=num_prompt,
                limit=sizes.max_sequence_length - 1,
                limit_name="max_sequence_length less one token to generate",
                remedy="shorten it or raise max_sequence_length",
            )
        if not self._config.enable_chunked_prefill and num_prompt > sizes.max_tokens:
            raise PromptTooLong(
                got=num_prompt,
                limit=sizes.max_tokens,
                limit_name="max_tokens of one step",
                remedy="set enable_chunked_prefill=True or raise max_tokens",
            )
        if num_prompt + 1 > capacity:
            raise PromptTooLong(
                got=num_prompt,
                limit=capacity - 1,
                limit_name=f"the pool's {blocks} tokens",
                remedy="raise buffer_size_gb or shorten the prompt",
            )
        if max_tokens is None:
            return min(sizes.max_sequence_length, capacity)
        wanted = min(num_prompt + max_tokens, sizes.max_sequence_length)
        if wanted > capacity:
            raise RequestError(
                f"prompt of {num_prompt:,} tokens and max_tokens={max_tokens:,} need room for {wanted - 1:,} "
                f"tokens, the pool holds {capacity - 1:,} ({blocks}); "
                "raise buffer_size_gb, or lower max_tokens (None takes what fits)"
            )
        return wanted

    def check_params(self, params: SamplingParams) -> None:
        """Check parameters against vocabulary and tokenizer."""
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids")
        for name, reason in self.unavailable.items():
            if (asked := getattr(params, name)) is not None and asked is not False:
                raise RequestError(f"{name}: {reason}")
        named: list[tuple[str, Iterable[int] | None]] = [
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_token_ids", params.bad_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ]
        for name, ids in named:
            wrong = [i for i in ids or () if not 0 <= i < self.vocab_size]
            if wrong:
                raise RequestError(
                    f"{name}: token id {wrong[0]} is outside the vocabulary (0 to {self.vocab_size - 1})"
                )
        self._check_choice(params)
        if params.adapter is not None:
            self.check_adapter(params.adapter)
        check_metadata(self._config.request_metadata_types, params, self.stop_ids(params))
        if params.structured is not None:
            self.grammars.cache.check(params.structured)

    def check_adapter(self, name: str) -> None:
        known = self.adapters
        if known is None:
            raise UnknownAdapter(
                f"adapter {name!r}: this engine has no adapters; build it with InferenceConfig(lora=LoRAConfig(...))"
            )
        if name not in known:
            raise UnknownAdapter(f"{unknown_name('adapter', name, known)}; load_adapter loads one")

    def _check_choice(self, params: SamplingParams) -> None:
        """Raises RequestError for ids that leave no token to draw, at all or before min_tokens."""
        bad = set(params.bad_token_ids or ())
        early = bad | self.stop_ids(params) if params.min_tokens else bad
        if params.allowed_token_ids is not None:
            allowed = set(params.allowed_token_ids)
            if not allowed - bad:
                raise RequestError("allowed_token_ids less bad_token_ids leaves no token to draw; allow at least one")
            if not allowed - early:
                raise RequestError(
                    f"min_tokens is {params.min_tokens:,}, and all allowed_token_ids end the sequence; allow others, "
                    "or give min_tokens 0"
                )
        elif len(bad) >= self.vocab_size:
            raise RequestError("bad_token_ids names the whole vocabulary; leave at least one token")
        elif len(early) >= self.vocab_size:
            raise RequestError("bad_token_ids leaves only tokens that end the sequence, which min_tokens forbids")

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end the output."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)

    def build(
        self, request_id: str, ids: list[int], params: SamplingParams, *, salt: str = "", caller: int = 0
    ) -> list[Request]:
        """The n sequences of a request; the first has the others as its siblings. salt: see `salt_of`."""
        max_total = self.check(ids, params)
        seed = params.seed
        if seed is None:
            seed = self.next_seed()
        stop_ids = self.stop_ids(params)
        sequences = [
            Request(
                id=sequence_id(request_id, index, params.n),
                tokens=list(ids),
                prompt_len=len(ids),
                params=params,
                max_total=max_total,
                seed=seed if index == 0 else derive_seed(seed, index),
                stop_ids=stop_ids,
                cache=CacheUse(allowed=may_share(params), salt=salt),
                caller=caller,
                grammar=None if params.structured is None else self.grammars.cache.compile(params.structured),
            )
            for index in range(params.n)
        ]
        sequences[0].siblings = tuple(sequences[1:])
        return sequences


def sequence_id(request_id: str, index: int, count: int) -> str:
    """The scheduler's name of one of a request's `count` sequences."""
    return request_id if count == 1 else f"{request_id}#{index}"


def may_share(params: SamplingParams) -> bool:
    """Whether cached blocks may replace prompt positions: not if the caller wants a value of every position."""
    return params.prompt_logprobs is None and not params.reads_positions and params.pooling not in ("mean", "all")


def salt_of(prompt: Prompt) -> str:
    """A prompt's cache salt: it shares cached prefixes only with prompts of the same salt; "" if it has none.

    Raises InvalidPrompt if it is not a str or is longer than MAX_SALT_CHARS.
    """
    salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
    if not isinstance(salt, str):
        raise InvalidPrompt(f"'cache_salt' is a {type(salt).__name__}, not text")
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidPrompt(f"'cache_salt' has {len(salt):,} characters, limit is {MAX_SALT_CHARS}; use a hash of it")
    return salt


def _from_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    salt_of(prompt)
    keys = set(prompt) - {"cache_salt"}
    if len(keys) != 1 or keys - {"prompt", "prompt_token_ids"}:
        raise InvalidPrompt(
            "a mapping prompt has exactly one of 'prompt' and 'prompt_token_ids', and 'cache_salt' if need be; "
            f"got keys {sorted(map(str, prompt))}"
        )
    value = prompt[keys.pop()]
    if "prompt" in prompt and not isinstance(value, str):
        raise InvalidPrompt(f"'prompt' is a {type(value).__name__}, not text")
    return value  # type: ignore[no-any-return]


def _as_ids(prompt: object) -> list[int]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # tensors and arrays
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidPrompt(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidPrompt(f"token ids are integers, got {item!r} ({type(item).__name__})")
    return list(prompt)


def is_single_prompt(prompts: object) -> bool:
    """True for one prompt (text, mapping, ids), False for a sequence of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):
        return prompts.ndim == 1
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(p, int) for p in prompts)
