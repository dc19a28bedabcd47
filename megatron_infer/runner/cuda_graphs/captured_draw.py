"""Draws at the end of a captured step: fixed shapes, parameters read on the device, no decision on the host.

    RowParams --rows that changed--> RowMirror (device) --row_S--> edits, filters --> token --> token_pool[row, here]
                                                   token_pool[row, : here] --^         `--> log probabilities, rank

A step's graph is replayed with other rows, positions and parameters than it was captured with: which row is greedy and
which is filtered, penalised or scored is therefore data. Rows that need a grammar mask, which is made on the host, or
list more than LISTED ids are drawn by the ordinary sampler, from the step's logits.
Legend: S sampled positions, R request rows, V vocab, P positions of a row, N columns, I ids that a row lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.draw_columns import LISTED, Asks, Column, DrawRoom
from megatron_infer.runner.sampling.filters import DrawParams, DrawResult, draw_any, draw_sorted
from megatron_infer.runner.sampling.logprobs import processed, score
from megatron_infer.runner.sampling.returned_details import needs_logits
from megatron_infer.runner.sampling.rng import GAMMA, MIX_FIRST, MIX_SECOND, mix
from megatron_infer.runner.sampling.row_params import GREEDY_BELOW, RETURNS, RowExtras, RowFlags, RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput
from megatron_infer.runner.sampling.upload import Upload


class DrawKernel(Protocol):
    """A GPU backend's `CapturedDraw.draw`."""

    def static_draw(
        self,
        logits_SV: Tensor,
        columns_NR: Tensor,
        lists_RI: Tensor,
        row_S: Tensor,
        position_S: Tensor,
        token_pool: Tensor,
        out: DrawRoom,
    ) -> None:
        """columns_NR, lists_RI: see RowMirror."""
        ...


class CapturedDraw:
    """Draws the tokens that `sampler` would draw, bit for bit, in a way that a graph can hold."""

    def __init__(
        self,
        sampler: Sampler,
        kernel: DrawKernel | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """sampler: over the whole vocabulary. kernel: None where this device's backend has none. gather: makes whole
        rows of logits of every rank's part; None where the vocabulary is not split over ranks.
        """
        self._sampler, self._kernel, self._gather = sampler, kernel, gather
        self._mirror: RowMirror | None = None
        self.drawn_outside: Counter[str] = Counter()
        """Reason -> steps that `can_draw` has refused."""

    def can_draw(self, inputs: SamplerInput) -> bool:
        """Whether `draw` serves these rows with all that they ask for; the same on every rank."""
        sampler = self._sampler
        reason = why_outside(sampler.params, inputs.rows, sampler.flags_of(inputs.rows, inputs.positions))
        if reason is None and self._gather is not None and _needs_logits(sampler.params, inputs.rows):
            reason = "alternatives or supports, of a vocabulary in parts"
        if reason is not None:
            self.drawn_outside[reason] += 1
        return reason is None

    @torch.inference_mode()
    def refresh(self) -> None:
        """Upload the parameters that changed; before each run of `draw`, never within a capture."""
        if self._mirror is None:
            sampler = self._sampler
            self._mirror = RowMirror(sampler.params, sampler.ops.to_device, is_processed=sampler.is_processed)
        self._mirror.refresh()

    def draw(self, logits_SV: Tensor, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom) -> None:
        """Each row's token and its log probabilities, from device tensors alone, into `out` [S] and the token pool.

        row_S, position_S: integers as in SamplerInput; padding has the dummy row, whose parameters are greedy, and any
        position. It can be captured: one sequence of launches, whatever the rows ask for, of shapes that follow from
        logits_SV.
        """
        assert self._mirror is not None, "draw before refresh"
        logits_SV = logits_SV if self._gather is None else self._gather(logits_SV)
        logits_SV, mirror = logits_SV[:, : self._sampler.vocab_size], self._mirror
        if self._kernel is None:
            static_draw(logits_SV, mirror, row_S, position_S, token_pool, out)
        else:
            self._kernel.static_draw(logits_SV, mirror.columns_NR, mirror.lists_RI, row_S, position_S, token_pool, out)

    def output(self, logits_SV: Tensor, inputs: SamplerInput, room: DrawRoom) -> SamplerOutput:
        """What `Sampler.sample` gives, for rows that `draw` has drawn into `room` from these logits: alternatives and
        supports are all that is computed here."""
        if self._gather is not None:  # only the shape is used: `can_draw` has refused rows that need their values
            logits_SV = logits_SV[:, :1].expand(-1, self._sampler.padded_vocab_size)
        drawn = DrawResult(room.tokens, room.top, room.cut_logit, room.cut_id, room.mass, room.own, room.raw, room.rank)
        return self._sampler.output_of_drawn(logits_SV, inputs, drawn, room.bad)


class RowMirror:
    """`RowParams` on the device, at fixed addresses; brought up to date between steps.

    Only rows that changed are uploaded: one array and one scatter, another of each for ids that they list, nothing
    where nothing changed. Each row has room for LISTED ids, so that the lists keep their address too.
    """

    def __init__(self, params: RowParams, stage: Upload, *, is_processed: bool = False) -> None:
        """is_processed: see `Sampler.is_processed`."""
        self._params, self._stage, self._version, self._is_processed = params, stage, 0, is_processed
        num_rows = len(params.flags)
        start = np.zeros((len(Column), num_rows), dtype=np.int64)
        neutral = ((Column.TOP_K, params.vocab_size), (Column.TOP_P, 1.0), (Column.TEMPERATURE, 1.0))
        for column, value in neutral:
            start[column] = np.float64(value).view(np.int64)
        self.columns_NR = stage(start)
        """int64 [Column, R]; some columns hold the bits of a float64."""
        self.lists_RI = stage(np.zeros((num_rows, LISTED), dtype=np.int64))
        """int64 [R, LISTED]: the ids that a row lists, each below the fp32 bits of its bias."""

    def refresh(self) -> None:
        """Upload the rows that changed since the last call; ordered on the current stream, never inside a capture.

        A call that was interrupted is repeated by the next.
        """
        params = self._params
        version = params.version
        if version == self._version:
            return
        changed = np.flatnonzero(params.changed_at > self._version)
        packed = np.zeros((1 + len(Column), len(changed)), dtype=np.int64)
        packed[0] = changed
        columns, values = packed[1:], packed[1:].view(np.float64)
        temperature, top_k, top_p, min_p, repetition, presence, frequency, prompt_len = params.table[:, changed]
        drawn = (params.flags[changed] & RowFlags.DRAW) != 0
        values[Column.INVERSE] = np.where(drawn, 1.0 / np.maximum(temperature, GREEDY_BELOW), 0.0)
        values[Column.TEMPERATURE] = np.where(drawn, temperature, 1.0)
        values[Column.TOP_K], values[Column.TOP_P], values[Column.MIN_P] = top_k, top_p, min_p
        values[Column.REPETITION], values[Column.PRESENCE] = repetition, presence
        values[Column.FREQUENCY], columns[Column.PROMPT_LEN] = frequency, prompt_len.astype(np.int64)
        columns[Column.STREAM] = mix(params.seed[changed]).view(np.int64)
        columns[Column.ASKS] = self._asks(params.flags[changed])
        columns[Column.MIN_TOTAL] = params.min_total[changed]
        listed = self._lists(changed, columns)
        staged = self._stage(packed)
        self.columns_NR.index_copy_(1, staged[0], staged[1:])
        if listed:
            at, entries = self._stage(np.concatenate(listed, axis=1))
            self.lists_RI.view(-1).index_copy_(0, at, entries)
        self._version = version

    def _asks(self, flags: np.ndarray) -> np.ndarray:
        pairs = [(RowFlags.PENALTY, Asks.PENALTY), (RowFlags.EDIT, Asks.EDIT), (RowFlags.MIN_TOKENS, Asks.MIN_TOKENS)]
        pairs.append((RETURNS["return_sampled_logprobs"], Asks.RAW | Asks.OWN))
        pairs.append((RowFlags.LOGPROBS, Asks.OWN | Asks.OWN_RANK if self._is_processed else Asks.RAW | Asks.RANK))
        asks = np.zeros(len(flags), dtype=np.int64)
        for flag, ask in pairs:
            asks |= np.where(flags & flag, int(ask), 0)
        return asks

    def _lists(self, changed: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
        """[place in lists_RI, entry] of each row that lists ids; writes into `columns` where each kind of id ends."""
        listed = []
        for place, row in enumerate(changed.tolist()):
            extras = self._params.extras.get(row)
            if extras is None:
                continue
            if num_listed(extras) > LISTED:
                columns[Column.ASKS, place] &= ~int(Asks.EDIT | Asks.MIN_TOKENS)
                continue
            if extras.allowed_ids is not None:
                columns[Column.ASKS, place] |= Asks.ALLOWED
            ascending = np.argsort(extras.bias_ids)
            values = extras.bias_values[ascending].view(np.int32).astype(np.int64) << 32
            allowed = () if extras.allowed_ids is None else extras.allowed_ids
            parts = (extras.bias_ids[ascending] | values, allowed, extras.bad_ids, extras.stop_ids)
            columns[Column.BIASED : Column.STOP + 1, place] = np.cumsum([len(part) for part in parts])
            entries = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
            listed.append(np.stack([row * LISTED + np.arange(len(entries)), entries]))
        return listed


def num_listed(extras: RowExtras) -> int:
    """Ids in all the lists of a row."""
    allowed = 0 if extras.allowed_ids is None else len(extras.allowed_ids)
    return len(extras.bias_ids) + allowed + len(extras.bad_ids) + len(extras.stop_ids)


def _needs_logits(params: RowParams, rows: np.ndarray) -> bool:
    """Whether a row's outputs need whole rows of logits after the draw: alternatives, or token details."""
    flags = params.flags[rows]
    has_alternatives = params.num_logprobs[rows[(flags & RowFlags.LOGPROBS) != 0]] > 0
    return bool(has_alternatives.any()) or needs_logits(params, rows, flags)


def why_outside(params: RowParams, rows: np.ndarray, flags: np.ndarray) -> str | None:
    """Why a captured draw cannot serve rows with these flags in force; None: it can."""
    union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
    if union & RowFlags.GRAMMAR:
        return "structured output"
    if union & (RowFlags.EDIT | RowFlags.MIN_TOKENS):
        for row in rows[(flags & (RowFlags.EDIT | RowFlags.MIN_TOKENS)) != 0].tolist():
            if num_listed(params.extras[row]) > LISTED:
                return f"a list of more than {LISTED:,} ids"
    return None


def uniform_of(stream_S: Tensor, position_S: Tensor) -> Tensor:
    """`rng.uniform` on the device, from Column.STREAM and int64 positions -> float64, bit for bit."""
    mixed = stream_S + (position_S + 1) * _signed(GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(MIX_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(MIX_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def static_draw(
    logits_SV: Tensor, mirror: RowMirror, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom
) -> None:
    """`CapturedDraw.draw` in torch.

    Every row is edited, sorted in full, drawn in every way and scored; its parameters select the results that it keeps.
    It is the reference, and what devices without a kernel run; it is not fast.
    """
    row_S, position_S = row_S.long(), position_S.long()
    columns_NS = mirror.columns_NR.index_select(1, row_S)
    values_NS = columns_NS.view(torch.float64)
    lists_SI = mirror.lists_RI.index_select(0, row_S)
    inverse, top_k, top_p, min_p = values_NS[:4]
    greedy = inverse == 0.0
    uniform_S = uniform_of(columns_NS[Column.STREAM], position_S)
    params = DrawParams(
        columns_5M=torch.stack([inverse.masked_fill(greedy, 1.0), top_k, top_p, min_p, uniform_S]),
        candidates=logits_SV.shape[1],
        needs_mass=True,
    )
    vocab = logits_SV.shape[1]
    work_SV = edited(logits_SV.float(), columns_NS, lists_SI, token_pool.index_select(0, row_S), position_S)
    filtered = ((top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)) & ~greedy
    free, kept = draw_any(work_SV, params), draw_sorted(work_SV, params)
    assert kept.cut_logit_M is not None and kept.cut_id_M is not None
    token = torch.where(greedy, work_SV.argmax(-1), torch.where(filtered, kept.token_M, free.token_M))
    bad_S = ~free.top_M.isfinite()
    token_S = token.masked_fill(bad_S, 0)
    put_drawn(token_pool, row_S, position_S, token_S)
    cut = DrawResult(token_S, free.top_M)
    cut.cut_logit_M = torch.where(filtered, kept.cut_logit_M, -torch.inf)
    cut.cut_id_M = torch.where(filtered, kept.cut_id_M, vocab)
    raw, rank, *_ = score(logits_SV, token_S, 0)
    own, own_rank, *_ = score(processed(work_SV, values_NS[Column.TEMPERATURE], cut), token_S, 0)
    of_own = (columns_NS[Column.ASKS] & Asks.OWN_RANK) != 0
    found = {"tokens": token_S, "bad": bad_S, "raw": raw, "own": own, "rank": torch.where(of_own, own_rank, rank)}
    found |= {"top": cut.top_M, "cut_logit": cut.cut_logit_M, "cut_id": cut.cut_id_M}
    for name, value in found.items():
        getattr(out, name).copy_(value)
    out.mass.zero_()


def edited(work_SV: Tensor, columns_NS: Tensor, lists_SI: Tensor, tokens_SP: Tensor, position_S: Tensor) -> Tensor:
    """fp32 logits after bias, allowed, bad and masked stop ids, and penalties -> fp32 [S, V].

    What `penalties.TokenEdits` and `Penalties` do, in their order and with their rounding.
    """
    rows, vocab = work_SV.shape
    asks_S1, ends = columns_NS[Column.ASKS].unsqueeze(1), columns_NS[Column.BIASED : Column.STOP + 1].unsqueeze(-1)
    is_edit = (asks_S1 & Asks.EDIT) != 0
    is_early = ((asks_S1 & Asks.MIN_TOKENS) != 0) & (position_S < columns_NS[Column.MIN_TOTAL]).unsqueeze(1)
    at_I = torch.arange(lists_SI.shape[1], device=work_SV.device)
    unused = torch.full_like(lists_SI, vocab)  # an additional column takes the ids that do not apply

    def ids(first: Tensor | int, end: Tensor, applies: Tensor) -> Tensor:
        return torch.where((at_I >= first) & (at_I < end) & applies, lists_SI & 0xFFFFFFFF, unused)

    def marked(ids_SI: Tensor) -> Tensor:
        return torch.zeros(rows, vocab + 1, device=work_SV.device).scatter_(1, ids_SI, 1.0)[:, :vocab] > 0

    wide = torch.nn.functional.pad(work_SV, (0, 1))
    biased = ids(0, ends[0], is_edit)
    bias = (lists_SI >> 32).to(torch.int32).view(torch.float32)
    work_SV = wide.scatter_(1, biased, wide.gather(1, biased) + bias)[:, :vocab].contiguous()
    forbidden = ((asks_S1 & Asks.ALLOWED) != 0) & is_edit & ~marked(ids(ends[0], ends[1], is_edit))
    forbidden |= marked(ids(ends[1], ends[2], is_edit)) | marked(ids(ends[2], ends[3], is_early))
    work_SV.masked_fill_(forbidden, -torch.inf)

    repetition, presence, frequency = (
        columns_NS.view(torch.float64)[column].float().unsqueeze(1)
        for column in (Column.REPETITION, Column.PRESENCE, Column.FREQUENCY)
    )
    at_P = torch.arange(tokens_SP.shape[1], device=work_SV.device)
    inside = (at_P < position_S.unsqueeze(1)) & ((asks_S1 & Asks.PENALTY) != 0)
    token_SP = torch.where(inside, tokens_SP.long(), vocab)
    drawn = (inside & (at_P >= columns_NS[Column.PROMPT_LEN].unsqueeze(1))).float()
    counts = torch.zeros(rows, vocab + 1, device=work_SV.device).scatter_add_(1, token_SP, drawn)[:, :vocab]
    seen = marked(token_SP)
    work_SV = torch.where(seen, torch.where(work_SV > 0, work_SV / repetition, work_SV * repetition), work_SV)
    return torch.where(counts > 0, work_SV - frequency * counts - presence, work_SV)


def put_drawn(token_pool: Tensor, row_S: Tensor, position_S: Tensor, token_S: Tensor) -> None:
    """token_pool[row, position] = token; rows of padding all write to the dummy row."""
    at = row_S.long() * token_pool.shape[1] + position_S.long()
    token_pool.view(-1).index_copy_(0, at, token_S.to(token_pool.dtype))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count as of unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)
