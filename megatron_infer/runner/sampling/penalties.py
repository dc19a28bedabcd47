"""Changes to logits before a token is chosen: bias, allowed and bad ids, min_tokens, penalties.

All of them act in place on fp32 [M, V] copies of the rows that ask for them.
Legend: M rows of a draw group, P those with penalties, L tokens of context, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.row_params import RowFlags, RowParams
from megatron_infer.runner.sampling.upload import Upload


@dataclass(slots=True, kw_only=True)
class TokenEdits:
    """logit_bias, then allowed ids, then bad ids and masked stop ids, as flat indices place in M * V + id."""

    bias_at: Tensor
    bias: Tensor
    allowed_M: Tensor
    allowed_at: Tensor
    banned_at: Tensor

    @staticmethod
    def build(params: RowParams, rows: np.ndarray, flags: np.ndarray, stage: Upload) -> TokenEdits | None:
        """The edits of request rows rows[M], whose flags in force are flags[M]; None if there are none."""
        edited = np.flatnonzero(flags & (RowFlags.EDIT | RowFlags.MIN_TOKENS))
        if not len(edited):
            return None
        bias_at, bias, allowed_places, allowed_at, banned_at = [], [], [], [], []
        for place in edited.tolist():
            extras, base = params.extras[int(rows[place])], place * params.vocab_size
            if flags[place] & RowFlags.EDIT:
                bias_at.append(base + extras.bias_ids)
                bias.append(extras.bias_values)
                banned_at.append(base + extras.bad_ids)
                if extras.allowed_ids is not None:
                    allowed_places.append(np.array([place]))
                    allowed_at.append(base + extras.allowed_ids)
            if flags[place] & RowFlags.MIN_TOKENS:
                banned_at.append(base + extras.stop_ids)

        def joined(parts: list[np.ndarray], dtype: type = np.int64) -> Tensor:
            return stage(np.concatenate([np.empty(0, dtype), *parts]))

        return TokenEdits(
            bias_at=joined(bias_at),
            bias=joined(bias, np.float32),
            allowed_M=joined(allowed_places),
            allowed_at=joined(allowed_at),
            banned_at=joined(banned_at),
        )

    def apply(self, logits_MV: Tensor) -> None:
        flat = logits_MV.view(-1)
        if self.bias_at.numel():
            flat[self.bias_at] += self.bias
        if self.allowed_M.numel():
            kept = flat[self.allowed_at]
            logits_MV.index_fill_(0, self.allowed_M, -torch.inf)
            flat[self.allowed_at] = kept
        if self.banned_at.numel():
            flat.index_fill_(0, self.banned_at, -torch.inf)


class Penalties:
    """Repetition over prompt and output, frequency and presence over output; reads the token pool each step."""

    def __init__(self, params: RowParams, rows: np.ndarray, flags: np.ndarray, stage: Upload) -> None:
        self.places = np.flatnonzero(flags & RowFlags.PENALTY)
        rows = rows[self.places]
        columns = stage(params.table[4:8, rows]).unsqueeze(-1)
        device = columns.device
        self._repetition, self._presence, self._frequency = columns[:3].float()
        self._prompt_len = columns[3].to(torch.int64)
        self._rows = stage(rows.astype(np.int64))
        self._base = stage(self.places * params.vocab_size).unsqueeze(1)
        self._count_base = torch.arange(len(rows), device=device).unsqueeze(1) * params.vocab_size
        self._num_counts = len(rows) * params.vocab_size if bool(params.table[5:7, rows].any()) else 0
        self._counts: Tensor | None = None
        """Zeros between steps, made when they are first needed."""

    def apply(self, logits_MV: Tensor, positions: np.ndarray, token_pool: Tensor, stage: Upload) -> None:
        """positions [M]: context lengths; token_pool int32 [rows, positions].

        Repetition r > 0 divides a positive logit and multiplies a negative one, once (arXiv:1909.05858, as in
        transformers); then logit -= frequency * count, logit -= presence where count > 0.
        """
        lengths = positions[self.places]
        longest = int(lengths.max())
        context = stage(lengths.astype(np.int64)).unsqueeze(1)
        tokens_PL = token_pool[:, :longest].index_select(0, self._rows).to(torch.int64)
        at = torch.arange(longest, device=logits_MV.device)
        inside = at < context
        # beyond its context a row repeats its first token, which gets the same value once more
        tokens_PL = torch.where(inside, tokens_PL, tokens_PL[:, :1])
        flat, flat_PL = logits_MV.view(-1), tokens_PL + self._base
        values = flat[flat_PL]
        values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if self._num_counts:
            kept, self._counts = self._counts, None  # made again if an interrupt comes before the zeros are back
            if kept is None:
                kept = torch.zeros(self._num_counts, device=logits_MV.device)
            count_at = (tokens_PL + self._count_base).view(-1)
            kept.scatter_add_(0, count_at, (inside & (at >= self._prompt_len)).float().view(-1))
            counts = kept[count_at].view_as(values)
            values = values - self._frequency * counts - self._presence * (counts > 0)
            self._counts = kept.index_fill_(0, count_at, 0.0)
        flat.scatter_(0, flat_PL.view(-1), values.view(-1))
