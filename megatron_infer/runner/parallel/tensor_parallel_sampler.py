"""Sampling where each rank holds a part of the vocabulary: the same tokens on every rank, bit for bit one process's.

    logits [S, V/n] ──greedy rows──▶ key of the best local token ─────────────────────────────┐
                    ──other rows───▶ all_to_all ▶ whole rows [S/n, V] ▶ the ordinary Sampler ──┴▶ all_gather ▶ all ranks

A rank never holds more logits than its own part has: S/n whole rows are as large as S rows of V/n. The ordinary sampler
draws a row independently of the other rows, so drawing a part of the rows gives the bits of drawing all.
Per step: one all_gather of a few integers a row, and one all_to_all before it where a row is more than plain greedy.
Legend: n ranks, V padded vocabulary, W = V/n, S sampled positions, P those that are plain greedy, O the others, M this
rank's share of O, A rows to be scored, C columns of results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.runner.sampling.filters import ids_of, sort_keys
from megatron_infer.runner.sampling.logprobs import LogprobBatch
from megatron_infer.runner.sampling.returned_details import (
    TOKEN_DETAILS,
    TokenDetailsBatch,
    num_bytes,
    returned_columns,
)
from megatron_infer.runner.sampling.row_params import CHANGES_LOGITS, RowFlags, RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput, StepSampler
from megatron_infer.runner.sampling.upload import Upload

_NOT_PLAIN = int(RowFlags.DRAW | RowFlags.LOGPROBS | TOKEN_DETAILS | CHANGES_LOGITS)
_POISONED = torch.iinfo(torch.int64).max
"""Key of a row with NaN or +inf among its logits: larger than any token's."""
_MASKED = int(sort_keys(torch.tensor(-torch.inf), torch.tensor(0)))
"""Key of a row with every token masked, and smaller than any other token's."""
_NOTHING = torch.iinfo(torch.int64).min
"""Key of a rank whose part is padding alone: smaller than any token's."""


def for_group(sampler: Sampler, group: Any) -> StepSampler:
    """The sampler for logits that are split over `group`; `sampler` itself where the group is None or one rank."""
    return sampler if group is None or group.size() == 1 else TensorParallelSampler(sampler, group)


def gather_rows(logits_SW: Tensor, group: Any) -> Tensor:
    """Whole rows [S, V] on every rank of the group, from each one's part; for the draw of a captured step.

    Which rows ask for what is data there, so that every rank draws all rows: S * V fp32 logits arrive at each rank,
    32 MiB for 64 rows of 128k, and no host waits for them.
    """
    size, (num_rows, width) = group.size(), logits_SW.shape
    parts = logits_SW.new_empty(size * num_rows, width)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(parts, logits_SW.contiguous(), group=group)
    return parts.view(size, num_rows, width).transpose(0, 1).reshape(num_rows, size * width)


class TensorParallelSampler:
    """`Sampler` for vocabulary shards: every rank calls it with the same rows and gets the same tokens.

    Collective: whether and what the ranks exchange follows from the rows' parameters alone, never from logits.
    """

    def __init__(self, sampler: Sampler, group: Any) -> None:
        self._sampler, self._spread = sampler, RowSpread(group)
        self.params: RowParams = sampler.params
        self._stage, self.vocab_size = sampler.ops.to_device, sampler.vocab_size
        size, padded = group.size(), sampler.padded_vocab_size
        assert padded % size == 0, f"{padded} logits over {size} ranks"
        self._width = padded // size
        first = group.rank() * self._width
        self._first_id, self._num_real = first, max(0, min(self._width, self.vocab_size - first))

    def sample(self, logits_SW: Tensor, inputs: SamplerInput) -> SamplerOutput:
        """One token a row, equal on every rank. logits_SW is this rank's [S, V/n], and is left as it was."""
        assert logits_SW.shape[1] == self._width, f"{logits_SW.shape[1]} logits, not {self._width}"
        flags = self._sampler.flags_of(inputs.rows, inputs.positions)
        plain = np.flatnonzero((flags & _NOT_PLAIN) == 0)
        others = np.flatnonzero(flags & _NOT_PLAIN)
        scored = np.flatnonzero(flags & RowFlags.LOGPROBS)
        counts = self.params.num_logprobs[inputs.rows[scored]]
        top = int(counts.max()) if len(scored) else None
        detailed, columns = returned_columns(self.params, inputs.rows, flags)
        widths = {key: _width(places, self.vocab_size) for key, places in columns.items()}
        packed_MC = self._draw_own(logits_SW, others, inputs, top, widths) if len(others) else None
        keys_P = self._best_keys(_rows(logits_SW, plain, self._stage)) if len(plain) else None
        packed_OC, keys_nP = self._spread.exchange(packed_MC, len(others), keys_P)
        device = logits_SW.device
        tokens_S = torch.empty(len(flags), dtype=torch.int64, device=device)
        bad_S = torch.empty(len(flags), dtype=torch.bool, device=device)
        if keys_nP is not None:
            tokens, bad = _best_of(keys_nP)
            _put(tokens_S, plain, tokens, self._stage)
            _put(bad_S, plain, bad, self._stage)
        if packed_OC is not None:
            _put(tokens_S, others, packed_OC[:, 0], self._stage)
            _put(bad_S, others, packed_OC[:, 1] != 0, self._stage)
        logprobs = details = None
        if top is not None:
            assert packed_OC is not None
            scores = _unpack(_rows(packed_OC, np.searchsorted(others, scored), self._stage)[:, 2 : 4 + 2 * top], top)
            logprobs = LogprobBatch(scored, *scores, counts)
        if columns:
            assert packed_OC is not None
            packed_AE = _rows(packed_OC, np.searchsorted(others, detailed), self._stage)[:, -sum(widths.values()) :]
            details = _unpack_details(packed_AE, detailed, columns, widths, self.vocab_size, self._stage)
        return SamplerOutput(tokens_S, bad_S, logprobs, details)

    def score(self, logits_AW: Tensor, token_A: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `logprobs.score` gives for the whole vocabulary, on every rank; logits_AW may be cut to vocab_size.

        The rows are exchanged here too, rather than partial sums of their softmax: a sum of partial sums would round
        otherwise than one over the whole row. The exchange costs little beside the output layer: it moves [A, V/n]
        numbers, each of which took 2 * D operations.
        """
        spread = self._spread
        own = spread.own(len(token_A))
        whole_MV = spread.whole_rows(logits_AW)[:, : self.vocab_size]
        packed_MC = _pack(self._sampler.score(whole_MV, token_A[own].contiguous(), top)) if len(whole_MV) else None
        if packed_MC is None:
            packed_MC = torch.empty(0, 2 + 2 * top, dtype=torch.int64, device=logits_AW.device)
        packed_AC, _ = spread.exchange(packed_MC, len(token_A), None)
        assert packed_AC is not None
        return _unpack(packed_AC, top)

    def _best_keys(self, logits_PW: Tensor) -> Tensor:
        """int64 [P] that sort as (largest local logit, lowest id that has it)."""
        if self._num_real == 0:
            return torch.full((len(logits_PW),), _NOTHING, dtype=torch.int64, device=logits_PW.device)
        real = logits_PW[:, : self._num_real]
        best_P, top_P = self._sampler.argmax(real)
        key_P = sort_keys(top_P, best_P + self._first_id)
        return key_P.masked_fill(top_P.isnan() | (top_P == torch.inf), _POISONED)

    def _draw_own(
        self,
        logits_SW: Tensor,
        others: np.ndarray,
        inputs: SamplerInput,
        top: int | None,
        widths: dict[str, int],
    ) -> Tensor:
        """Draw this rank's share of the rows `others` -> int64 [M, C]: token, bad, scores (`_pack`), token details."""
        whole_MV = self._spread.whole_rows(_rows(logits_SW, others, self._stage))
        num_columns = (2 if top is None else 4 + 2 * top) + sum(widths.values())
        packed = torch.zeros(len(whole_MV), num_columns, dtype=torch.int64, device=logits_SW.device)
        if not len(whole_MV):
            return packed
        places = others[self._spread.own(len(others))]
        out = self._sampler.sample(
            whole_MV,
            SamplerInput(
                rows=inputs.rows[places],
                positions=inputs.positions[places],
                token_pool=inputs.token_pool,
                masks=None if inputs.masks is None else inputs.masks.take(places),
            ),
        )
        packed[:, 0], packed[:, 1] = out.tokens_S, out.bad_S
        found = out.logprobs
        if found is not None:
            assert top is not None
            scores = (found.token_logprob, found.token_rank, found.top_ids, found.top_logprobs)
            index = self._stage(found.index)
            packed[:, 2 : 4 + 2 * top].index_copy_(0, index, _pack(scores, top))
        if out.token_details is not None:
            _pack_details(packed[:, -sum(widths.values()) :], out.token_details, widths, self._stage)
        return packed


class RowSpread:
    """Exchanges every rank's part of rows, [A, V/n], for whole rows of a contiguous share; gathers their results."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def counts(self, num_rows: int) -> list[int]:
        """Rows of each rank's share; some are 0 when there are fewer rows than ranks."""
        return [num_rows // self.size + (rank < num_rows % self.size) for rank in range(self.size)]

    def own(self, num_rows: int) -> slice:
        counts = self.counts(num_rows)
        first = sum(counts[: self.rank])
        return slice(first, first + counts[self.rank])

    def whole_rows(self, logits_AW: Tensor) -> Tensor:
        """This rank's share of the rows, with the columns of all ranks in order."""
        counts = self.counts(len(logits_AW))
        num_own, width = counts[self.rank], logits_AW.shape[1]
        received = logits_AW.new_empty(self.size * num_own, width)
        dist.all_to_all_single(received, logits_AW.contiguous(), [num_own] * self.size, counts, group=self.group)
        return received.view(self.size, num_own, width).transpose(0, 1).reshape(num_own, self.size * width)

    def exchange(
        self, packed_MC: Tensor | None, num_rows: int, keys_P: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """One all_gather of int64: every share's rows in order [num_rows, C], and every rank's keys [n, P]."""
        counts, parts = self.counts(num_rows), []
        columns = 0
        if packed_MC is not None:
            columns = packed_MC.shape[1]
            share = packed_MC.new_zeros(counts[0], columns)  # the first rank's share is a largest one
            share[: len(packed_MC)] = packed_MC
            parts.append(share.view(-1))
        if keys_P is not None:
            parts.append(keys_P)
        own = torch.cat(parts)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=self.group)
        length, packed, keys = counts[0] * columns, None, None
        if packed_MC is not None:
            shares = [got[:length].view(-1, columns)[:count] for got, count in zip(gathered, counts, strict=True)]
            packed = torch.cat(shares)
        if keys_P is not None:
            keys = torch.stack([got[length:] for got in gathered])
        return packed, keys


def _best_of(keys_nP: Tensor) -> tuple[Tensor, Tensor]:
    """(token, whether there is none) of each row from every rank's key."""
    key_P = keys_nP.amax(0)
    bad_P = (key_P == _POISONED) | (key_P <= _MASKED)
    return ids_of(key_P).masked_fill(bad_P, 0), bad_P


def _rows(tensor_S: Tensor, places: np.ndarray, stage: Upload) -> Tensor:
    """The rows at ascending `places`: the tensor itself when that is all of them."""
    if len(places) == len(tensor_S):
        return tensor_S
    return tensor_S.index_select(0, stage(places))


def _put(out_S: Tensor, places: np.ndarray, values: Tensor, stage: Upload) -> None:
    if len(places) == len(out_S):
        out_S.copy_(values)
    else:
        out_S.index_copy_(0, stage(places), values)


def _pack(scores: tuple[Tensor, Tensor, Tensor, Tensor], top: int | None = None) -> Tensor:
    """Log probability, rank, `top` ids and their log probabilities of each row as int64; fp32 as its bits."""
    logprob, rank, top_ids, top_logprobs = scores
    have = top_ids.shape[1]
    top = have if top is None else top
    packed = torch.zeros(len(rank), 2 + 2 * top, dtype=torch.int64, device=rank.device)
    packed[:, 0], packed[:, 1] = logprob.view(torch.int32), rank
    packed[:, 2 : 2 + have], packed[:, 2 + top : 2 + top + have] = top_ids, top_logprobs.view(torch.int32)
    return packed


def _unpack(packed: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def fp32(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    return fp32(packed[:, 0]), packed[:, 1].clone(), packed[:, 2 : 2 + top].clone(), fp32(packed[:, 2 + top :])


def _width(places: np.ndarray | None, vocab_size: int) -> int:
    """Columns of a step's token detail: one for a number; a set of ids has its bits where any row has them."""
    if places is None:
        return 1
    return num_bytes(vocab_size) // 8 if (places >= 0).any() else 0


def _pack_details(packed_ME: Tensor, details: TokenDetailsBatch, widths: dict[str, int], stage: Upload) -> None:
    """Fill the last columns of this rank's rows, E of them; a number of 4 bytes is its bits."""
    start = 0
    for key, width in widths.items():
        values, places = details.values.get(key), details.places.get(key)
        if values is not None and places is None:
            packed_ME[stage(details.index), start] = values.view(torch.int32).to(torch.int64)
        elif values is not None and places is not None and len(values):
            packed_ME[stage(details.index[places >= 0]), start : start + width] = values.view(torch.int64)
        start += width


def _unpack_details(
    packed_AE: Tensor,
    index: np.ndarray,
    columns: dict[str, np.ndarray | None],
    widths: dict[str, int],
    vocab_size: int,
    stage: Upload,
) -> TokenDetailsBatch:
    """The details that `_pack_details` packed, of every rank's rows."""
    values, parts = {}, packed_AE.split(list(widths.values()), dim=1)
    for (key, places), part in zip(columns.items(), parts, strict=True):
        if places is None:
            values[key] = part[:, 0].to(torch.int32).view(torch.float32)
        elif part.shape[1]:
            values[key] = _rows(part, np.flatnonzero(places >= 0), stage).contiguous().view(torch.uint8)
        else:
            values[key] = torch.empty(0, num_bytes(vocab_size), dtype=torch.uint8, device=packed_AE.device)
    places_of = {key: places for key, places in columns.items() if places is not None}
    return TokenDetailsBatch(index, values, places_of, vocab_size)
