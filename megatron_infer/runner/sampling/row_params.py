"""Sampling parameters of every request row, as numpy columns on the host: written at admission, read by each step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

import numpy as np

from megatron_infer.outputs.token_outputs import PARAMETERS, TOKEN_OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_infer.scheduler.request import Request

GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: it leaves all probability to the largest logit."""


class RowFlags(IntFlag):
    """Stages that a row goes through and outputs that it returns."""

    DRAW = 1
    """A random draw: without it the row is greedy."""
    FILTER = 2
    """top_k, top_p or min_p cut the distribution."""
    PENALTY = 4
    EDIT = 8
    """logit_bias, allowed_token_ids or bad_token_ids."""
    MIN_TOKENS = 16
    LOGPROBS = 32
    GRAMMAR = 256
    """Structured output: only tokens that the step's mask allows."""


RETURNS = {
    asked_by: 1 << 16 + place
    for place, asked_by in enumerate(PARAMETERS)
    if any(output.asked_by == asked_by and not output.per_position for output in TOKEN_OUTPUTS)
}
"""Further bits of a row's flags, by the parameter that asks for an output of drawn tokens."""


CHANGES_LOGITS = RowFlags.PENALTY | RowFlags.EDIT | RowFlags.MIN_TOKENS | RowFlags.GRAMMAR
"""Stages that change logits before a token is chosen from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """One row's lists of token ids (int64, without duplicates)."""

    bias_ids: np.ndarray
    bias_values: np.ndarray
    allowed_ids: np.ndarray | None
    bad_ids: np.ndarray
    stop_ids: np.ndarray
    """Not to be drawn before min_tokens."""


class RowParams:
    """Sampling parameters by request row. `version` counts changes: what was derived from an older one is stale."""

    COLUMNS = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "prompt_len")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.version = 0
        self.changed_at: np.ndarray = np.zeros(num_rows, dtype=np.int64)
        """`version` of each row's last change: a copy made at an older version updates the rows that are above it."""
        self.table: np.ndarray = np.zeros((len(self.COLUMNS), num_rows))
        """float64 [columns, rows]: one gather and one copy bring a step's rows to the device."""
        self.flags: np.ndarray = np.zeros(num_rows, dtype=np.int32)
        self.seed: np.ndarray = np.zeros(num_rows, dtype=np.uint64)
        self.min_total: np.ndarray = np.zeros(num_rows, dtype=np.int64)
        """Sequence length below which stop ids are masked."""
        self.num_logprobs: np.ndarray = np.full(num_rows, -1, dtype=np.int32)
        """-1: none; 0: the drawn token's; k: and the k most likely."""
        self.extras: dict[int, RowExtras] = {}

    def set(self, row: int, request: Request) -> None:
        """`row` is `request`'s from now on; the input processor has checked its token ids against the vocabulary."""
        params = request.params
        self.clear(row)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.table[:, row] = (
            params.temperature,
            top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            request.prompt_len,
        )
        flags = RowFlags(0)
        if params.temperature >= GREEDY_BELOW:
            flags |= RowFlags.DRAW
            if top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= RowFlags.FILTER
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            flags |= RowFlags.PENALTY
        if params.logit_bias or params.allowed_token_ids is not None or params.bad_token_ids:
            flags |= RowFlags.EDIT
        if params.min_tokens > 0 and request.stop_ids:
            flags |= RowFlags.MIN_TOKENS
            self.min_total[row] = request.prompt_len + params.min_tokens
        if params.logprobs is not None:
            flags |= RowFlags.LOGPROBS
            self.num_logprobs[row] = min(params.logprobs, self.vocab_size)
        for asked_by, bit in RETURNS.items():
            if getattr(params, asked_by):
                flags |= bit
        if params.structured is not None:
            flags |= RowFlags.GRAMMAR
        if flags & (RowFlags.EDIT | RowFlags.MIN_TOKENS):
            self.extras[row] = self._extras(request)
        self.flags[row] = flags
        self.seed[row] = request.seed & 0xFFFFFFFFFFFFFFFF

    def clear(self, row: int) -> None:
        """Greedy, with every option off."""
        self.version += 1
        self.changed_at[row] = self.version
        self.flags[row] = 0
        self.num_logprobs[row] = -1
        self.extras.pop(row, None)

    def _extras(self, request: Request) -> RowExtras:
        params = request.params
        bias = dict(params.logit_bias or {})
        allowed = params.allowed_token_ids
        extras = RowExtras(
            bias_ids=np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            bias_values=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            allowed_ids=None if allowed is None else _unique(allowed),
            bad_ids=_unique(params.bad_token_ids or ()),
            stop_ids=_unique(request.stop_ids),
        )
        for ids in (extras.bias_ids, extras.allowed_ids, extras.bad_ids, extras.stop_ids):
            if ids is not None and len(ids):
                low, high = int(ids.min()), int(ids.max())
                assert low >= 0 and high < self.vocab_size, (
                    f"{request.id}: ids {low}..{high} in a vocabulary of {self.vocab_size}"
                )
        return extras


def _unique(ids: Iterable[int]) -> np.ndarray:
    unique: np.ndarray = np.unique(np.fromiter(ids, dtype=np.int64))
    return unique
