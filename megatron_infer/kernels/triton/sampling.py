"""Draws, log probabilities and masks in Triton: one token per row from logits that stay on the device.

    logits [S, V] --chunk_maxima--> maxima of groups, best of chunks --chunk_masses--> sums of weights --draw--> token

The first two kernels run one program per chunk of CHUNK ids, the third one per row; programs of a greedy row return
early from the last two, and a row without a filter reads one chunk again. A filtered row collects the few candidates
that its filters can reach (`gather_candidates`) and searches them in registers, with four times as many where they are
not enough. Where these are too few (a nucleus of a thousand tokens, a top_k above HELD, very many equal logits) the
whole row is searched by bisection: per filter up to 16 (bfloat16) or 32 (float32) passes over it, read from the L2
cache by one multiprocessor, which sum only what is still undecided. Integer sums are exact, so that a row's token does
not depend on how the work is divided or on the other rows.

The tokens are those of runner/sampling/filters.py and of native/sampling.cpp. Their exponentials differ in the last
unit of a float64: one weight in about 2**13 differs by 1 of 2**40, and a token could differ where the draw falls on
such a boundary, about once in 2**30 draws.

A captured draw also gives log probabilities, from the sums of the draw and from sums of weights at temperature 1,
computed while the same logits are in registers.

Bytes: V * (2 or 4) from memory once, the same again from L2 for the masses. Not yet run on a GPU.
Legend: S rows drawn, A rows scored, R request rows, V vocab, C chunks, G groups, W words of 32 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_infer.kernels.draw_columns import Column, DrawRoom
from megatron_infer.kernels.triton.launch import cdiv, kernels_unavailable, launch
from megatron_infer.kernels.triton.sampling_kernels import (
    best_kernel,
    chunk_masses_kernel,
    chunk_maxima_kernel,
    chunk_ranks_kernel,
    draw_kernel,
    forbid_kernel,
    score_kernel,
)
from megatron_infer.kernels.triton_scratch import DRAW_CHUNK as CHUNK
from megatron_infer.kernels.triton_scratch import DRAW_GROUP as GROUP
from megatron_infer.kernels.triton_scratch import DRAW_HELD as HELD
from megatron_infer.kernels.triton_scratch import draw_chunks

TILE = 32
"""Groups that are read at once."""
BLOCK = 4096
DRAW_WARPS = 16
MANY = 256
"""Groups whose maxima bound the candidates of rows without a top_k."""
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a fp32 value that are always 0 in values of the dtype."""


class TritonSampling:
    """runner/sampling/filters.py, logprobs.py, token_masks.py and the captured draw for fp32, bf16, fp16 logits on a
    GPU."""

    def __init__(self, *, held: int = HELD) -> None:
        """held: candidates in registers, a power of two; with fewer of them more rows are searched as a whole."""
        self._held = held

    def argmax(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """`select.Argmax`; rows may be strided."""
        scratch = _Scratch(logits_SV, self._held)
        scratch.scan()
        token_S = torch.empty(scratch.num_rows, dtype=torch.int64, device=logits_SV.device)
        if scratch.num_rows:
            launch(
                best_kernel,
                (scratch.num_rows,),
                scratch.best,
                scratch.best_id,
                token_S,
                scratch.num_chunks,
                CHUNKS=scratch.chunks,
                num_warps=1,
            )
        return token_S, logits_SV.amax(-1).float()  # the search passes over NaN

    def draw(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`SamplingKernels.draw`; an inverse temperature of 0 draws the largest logit."""
        rows, device = len(logits_MV), logits_MV.device
        assert columns_5M.shape == (5, rows) and columns_5M.is_contiguous() and columns_5M.dtype is torch.float64
        token, cut_id, mass = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
        top, cut_logit, own = (torch.empty(rows, device=device) for _ in range(3))
        if rows:
            scratch = _Scratch(logits_MV, self._held)
            scratch.scan()
            scratch.sum_up(columns_5M, None, None, None)
            inputs = (columns_5M, columns_5M.stride(0), None, None, None, None, 0, None)
            self._draw(scratch, inputs, (token, top, None, cut_logit, cut_id, mass, own, None))
        return token, top, cut_logit, cut_id, mass, own

    def static_draw(
        self,
        logits_SV: Tensor,
        columns_NR: Tensor,
        row_S: Tensor,
        position_S: Tensor,
        token_pool: Tensor,
        out: DrawRoom,
    ) -> None:
        """`DrawKernel.static_draw`: three launches, whatever the rows ask for."""
        rows = len(logits_SV)
        assert columns_NR.shape[0] == len(Column) and columns_NR.stride(1) == token_pool.stride(1) == 1
        assert row_S.is_contiguous() and position_S.is_contiguous()
        assert len(row_S) == len(position_S) == len(out.tokens) == rows
        if not rows:
            return
        scratch = _Scratch(logits_SV, self._held)
        scratch.scan()
        columns, model_mass = columns_NR.view(torch.float64), torch.empty_like(scratch.mass)
        scratch.sum_up(columns, row_S, columns_NR, model_mass)
        pool = (token_pool, token_pool.stride(0))
        inputs = (columns, columns_NR.stride(0), columns_NR, row_S, position_S, *pool, model_mass)
        bad = out.bad.view(torch.uint8)
        found = (out.tokens, out.top, bad, out.cut_logit, out.cut_id, out.mass, out.own, out.raw)
        self._draw(scratch, inputs, found)

    def score(
        self, logits_AV: Tensor, token_A: Tensor, top: int, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`SamplingKernels.score`; logits keep their dtype, and no tensor [A, V] is made."""
        (rows, vocab), device = logits_AV.shape, logits_AV.device
        assert token_A.dtype is torch.int64 and token_A.is_contiguous() and len(token_A) == rows and top <= vocab
        logprob, top_logprobs = torch.empty(rows, device=device), torch.empty((rows, top), device=device)
        rank = torch.empty(rows, dtype=torch.int64, device=device)
        top_ids = torch.empty((rows, top), dtype=torch.int64, device=device)
        if not rows:
            return logprob, rank, top_ids, top_logprobs
        scratch = _Scratch(logits_AV, self._held)
        scratch.scan()
        before = torch.empty((rows, scratch.num_chunks), dtype=torch.int32, device=device)
        mass = None if known is None else known[0]
        launch(
            chunk_ranks_kernel,
            (rows, scratch.num_chunks),
            logits_AV,
            logits_AV.stride(0),
            scratch.best,
            scratch.mass,
            before,
            token_A,
            mass,
            vocab,
            scratch.num_chunks,
            CHUNK=CHUNK,
            CHUNKS=scratch.chunks,
            num_warps=4,
        )
        launch(
            score_kernel,
            (rows,),
            logits_AV,
            logits_AV.stride(0),
            scratch.maxima,
            scratch.best,
            scratch.mass,
            before,
            scratch.listed,
            scratch.held,
            token_A,
            mass,
            logprob,
            rank,
            top_ids,
            top_logprobs,
            top,
            vocab,
            scratch.num_chunks,
            **scratch.cuts(),
            num_warps=8,
        )
        return logprob, rank, top_ids, top_logprobs

    def forbid(self, work_MV: Tensor, bits_GW: Tensor, rows_G: Tensor | None) -> None:
        """`forbid` of runner/sampling/token_masks.py."""
        masks, words = bits_GW.shape
        vocab = work_MV.shape[1]
        assert work_MV.dtype is torch.float32 and work_MV.stride(1) == 1 and bits_GW.is_contiguous()
        assert words * 32 >= vocab, f"{words * 32} bits for {vocab} tokens"
        if masks:
            grid = (masks, cdiv(vocab, BLOCK))
            launch(
                forbid_kernel,
                grid,
                work_MV,
                work_MV.stride(0),
                bits_GW,
                words,
                rows_G,
                vocab,
                BLOCK=BLOCK,
                num_warps=4,
            )

    def _draw(
        self, scratch: _Scratch, inputs: tuple[Tensor | int | None, ...], outputs: tuple[Tensor | None, ...]
    ) -> None:
        """inputs: from columns_ptr on; outputs: from token_ptr on."""
        launch(
            draw_kernel,
            (scratch.num_rows,),
            scratch.logits,
            scratch.logits.stride(0),
            scratch.maxima,
            scratch.best,
            scratch.best_id,
            scratch.mass,
            scratch.listed,
            scratch.held,
            *inputs,
            *outputs,
            scratch.vocab,
            scratch.num_chunks,
            STATIC=outputs[-1] is not None,
            MANY=min(MANY, self._held // 2),
            **scratch.cuts(),
            num_warps=DRAW_WARPS,
        )


class _Scratch:
    """The scratch tensors of one call's kernels."""

    def __init__(self, logits_SV: Tensor, held: int) -> None:
        self.num_rows, self.vocab = logits_SV.shape
        assert logits_SV.stride(1) == 1, "the logits of a row lie side by side"
        self.num_chunks, self.groups = draw_chunks(self.vocab)
        self.chunks = self.groups // (CHUNK // GROUP)
        self.logits, device = logits_SV, logits_SV.device
        shape = (self.num_rows, self.num_chunks)
        self.best, self.best_id = (
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )
        self.maxima = torch.empty((*shape, CHUNK // GROUP), device=device)
        self.mass = torch.empty(shape, dtype=torch.int64, device=device)
        self.listed = torch.empty((self.num_rows, self.groups), dtype=torch.int32, device=device)
        self.held = torch.empty((self.num_rows, 4, held), dtype=torch.int32, device=device)

    def scan(self) -> None:
        """Fill the maxima."""
        if not self.num_rows:
            return
        launch(
            chunk_maxima_kernel,
            (self.num_rows, self.num_chunks),
            self.logits,
            self.logits.stride(0),
            self.maxima,
            self.best,
            self.best_id,
            self.vocab,
            self.num_chunks,
            CHUNK=CHUNK,
            GROUP=GROUP,
            num_warps=8,
        )

    def sum_up(
        self, columns: Tensor, row_S: Tensor | None, columns_NR: Tensor | None, model_mass: Tensor | None
    ) -> None:
        """Fill the masses of the rows whose draw needs them. The others: in a captured draw, where `columns` has every
        request row and model_mass is filled for rows that ask for it."""
        launch(
            chunk_masses_kernel,
            (self.num_rows, self.num_chunks),
            self.logits,
            self.logits.stride(0),
            self.best,
            self.mass,
            columns,
            columns.stride(0),
            row_S,
            columns_NR,
            model_mass,
            self.vocab,
            self.num_chunks,
            CHUNK=CHUNK,
            CHUNKS=self.chunks,
            STATIC=model_mass is not None,
            num_warps=4,
        )

    def cuts(self) -> dict[str, int]:
        """Constexprs of the kernels with one program per row."""
        return {
            "CHUNK": CHUNK,
            "CHUNKS": self.chunks,
            "GROUP": GROUP,
            "GROUPS": self.groups,
            "TILE": TILE,
            "HELD": self.held.shape[2],
            "BLOCK": BLOCK,
            "SHIFT": SHIFTS[self.logits.dtype],
        }


unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonSampling:
    return TritonSampling()
