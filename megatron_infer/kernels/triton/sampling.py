"""Draws, log probabilities and masks in Triton: one token a row out of logits that never leave the device.

    logits [S, V] --chunk_maxima--> maxima of groups, best of chunks --chunk_masses--> sums of weights --draw--> token

The first two run a program per chunk of CHUNK ids, the third one per row; a greedy row leaves the last two at once, and
a row without a filter reads one chunk again. A filtered row collects the few candidates that its filters can reach
(`gather_candidates`) and searches them in registers, with four times as many where they are not enough. Where these are
too few (a nucleus of a thousand tokens, a top_k above HELD, very many equal logits) the whole row is searched by
bisection: up to 16 (bfloat16) or 32 (float32) passes over it a filter, read from the L2 cache by one multiprocessor and
summing only what is still undecided. Integer sums are exact, so that a row's token depends neither on the cut of the
work nor on the row's company.

The tokens are those of sampling/filters.py and of native/sampling.cpp. Their exponentials differ in the last unit of a
float64: one weight in about 2**13 differs by 1 of 2**40, and a token could differ where the draw falls on such a
boundary, about once in 2**30 draws.

Bytes: V * (2 or 4) from memory once, the same again from L2 for the masses. Not yet run on a GPU.
Legend: S rows drawn, A rows scored, R request rows, V vocab, C chunks, G groups, W words of 32 tokens.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_infer.kernels.triton import launch as launching
from megatron_infer.kernels.triton.launch import AotVariant, launch
from megatron_infer.kernels.triton.sampling_kernels import (
    best_kernel,
    chunk_masses_kernel,
    chunk_maxima_kernel,
    chunk_ranks_kernel,
    draw_kernel,
    forbid_kernel,
    score_kernel,
)

CHUNK, GROUP = 4096, 64
HELD = 2048
"""Candidates that a filtered row holds in registers at first; twice as many where these are not enough."""
TILE = 32
"""Groups read at a time."""
BLOCK = 4096
DRAW_WARPS = 16
MANY = 256
"""Groups whose maxima bound the candidates where no top_k says how many."""
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a fp32 value that the dtype never sets."""


class TritonSampling:
    """What `sampling.filters`, `logprobs`, `static` and `masks` do, for rows of fp32, bf16 or fp16 logits on a GPU."""

    def __init__(self, *, held: int = HELD) -> None:
        """held: a power of two; a smaller one sends more rows the way over the whole row."""
        self._held = held

    def argmax(self, logits_SV: Tensor) -> Tensor:
        """int64 [S], the lowest id among equals; rows may be strided."""
        room = _Room(logits_SV, self._held)
        room.scan()
        token_S = torch.empty(room.num_rows, dtype=torch.int64, device=logits_SV.device)
        if room.num_rows:
            launch(
                best_kernel,
                (room.num_rows,),
                room.best,
                room.best_id,
                token_S,
                room.num_chunks,
                CHUNKS=room.chunks,
                num_warps=1,
            )
        return token_S

    def draw(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`SamplingKernels.draw`; an inverse temperature of 0 draws the largest logit."""
        rows, device = len(logits_MV), logits_MV.device
        assert columns_5M.shape == (5, rows) and columns_5M.is_contiguous() and columns_5M.dtype is torch.float64
        token, cut_id, mass = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
        top, cut_logit = torch.empty(rows, device=device), torch.empty(rows, device=device)
        if rows:
            inputs = (columns_5M, rows, None, None, None, None, 0)
            self._draw(logits_MV, inputs, (token, top, None, cut_logit, cut_id, mass), static=False)
        return token, top, cut_logit, cut_id, mass

    def static_draw(
        self,
        logits_SV: Tensor,
        columns_4R: Tensor,
        stream_R: Tensor,
        row_S: Tensor,
        position_S: Tensor,
        token_pool: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`DeviceKernels.static_draw`: three launches, whatever the rows want."""
        rows, device = len(logits_SV), logits_SV.device
        assert columns_4R.stride(1) == stream_R.stride(0) == token_pool.stride(1) == 1
        assert row_S.is_contiguous() and position_S.is_contiguous() and len(row_S) == len(position_S) == rows
        token_S = torch.empty(rows, dtype=torch.int64, device=device)
        bad_S = torch.empty(rows, dtype=torch.uint8, device=device)
        if rows:
            inputs = (columns_4R, columns_4R.stride(0), stream_R, row_S, position_S, token_pool, token_pool.stride(0))
            self._draw(logits_SV, inputs, (token_S, None, bad_S, None, None, None), static=True)
        return token_S, bad_S.view(torch.bool)

    def score(
        self, logits_AV: Tensor, token_A: Tensor, top: int, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`SamplingKernels.score`; logits stay in their dtype, nothing of [A, V] is made."""
        (rows, vocab), device = logits_AV.shape, logits_AV.device
        assert token_A.dtype is torch.int64 and token_A.is_contiguous() and len(token_A) == rows and top <= vocab
        logprob, top_logprobs = torch.empty(rows, device=device), torch.empty((rows, top), device=device)
        rank = torch.empty(rows, dtype=torch.int64, device=device)
        top_ids = torch.empty((rows, top), dtype=torch.int64, device=device)
        if not rows:
            return logprob, rank, top_ids, top_logprobs
        room = _Room(logits_AV, self._held)
        room.scan()
        before = torch.empty((rows, room.num_chunks), dtype=torch.int32, device=device)
        mass = None if known is None else known[0]
        launch(
            chunk_ranks_kernel,
            (rows, room.num_chunks),
            logits_AV,
            logits_AV.stride(0),
            room.best,
            room.mass,
            before,
            token_A,
            mass,
            vocab,
            room.num_chunks,
            CHUNK=CHUNK,
            CHUNKS=room.chunks,
            num_warps=4,
        )
        launch(
            score_kernel,
            (rows,),
            logits_AV,
            logits_AV.stride(0),
            room.maxima,
            room.best,
            room.mass,
            before,
            room.listed,
            room.held,
            token_A,
            mass,
            logprob,
            rank,
            top_ids,
            top_logprobs,
            top,
            vocab,
            room.num_chunks,
            **room.cuts(self._held),
            num_warps=8,
        )
        return logprob, rank, top_ids, top_logprobs

    def forbid(self, work_MV: Tensor, bits_GW: Tensor, rows_G: Tensor | None) -> None:
        """`masks.forbid`."""
        masks, words = bits_GW.shape
        vocab = work_MV.shape[1]
        assert work_MV.dtype is torch.float32 and work_MV.stride(1) == 1 and bits_GW.is_contiguous()
        assert words * 32 >= vocab, f"{words * 32} bits for {vocab} tokens"
        if masks:
            grid = (masks, triton.cdiv(vocab, BLOCK))
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
        self,
        logits: Tensor,
        inputs: tuple[Tensor | int | None, ...],
        outputs: tuple[Tensor | None, ...],
        *,
        static: bool,
    ) -> None:
        room = _Room(logits, self._held)
        room.scan()
        columns, stride, _, row, *_ = inputs
        launch(
            chunk_masses_kernel,
            (room.num_rows, room.num_chunks),
            logits,
            logits.stride(0),
            room.best,
            room.mass,
            columns,
            stride,
            row,
            room.vocab,
            room.num_chunks,
            CHUNK=CHUNK,
            CHUNKS=room.chunks,
            STATIC=static,
            num_warps=4,
        )
        launch(
            draw_kernel,
            (room.num_rows,),
            logits,
            logits.stride(0),
            room.maxima,
            room.best,
            room.best_id,
            room.mass,
            room.listed,
            room.held,
            *inputs,
            *outputs,
            room.vocab,
            room.num_chunks,
            STATIC=static,
            MANY=min(MANY, self._held // 2),
            **room.cuts(self._held),
            num_warps=DRAW_WARPS,
        )


class _Room:
    """What the kernels of one call hand to each other."""

    def __init__(self, logits_SV: Tensor, held: int) -> None:
        self.num_rows, self.vocab = logits_SV.shape
        assert logits_SV.stride(1) == 1, "the logits of a row lie side by side"
        self.num_chunks = triton.cdiv(self.vocab, CHUNK)
        self.chunks = triton.next_power_of_2(self.num_chunks)
        self.groups = self.chunks * (CHUNK // GROUP)
        self._logits_SV, device = logits_SV, logits_SV.device
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
            self._logits_SV,
            self._logits_SV.stride(0),
            self.maxima,
            self.best,
            self.best_id,
            self.vocab,
            self.num_chunks,
            CHUNK=CHUNK,
            GROUP=GROUP,
            num_warps=8,
        )

    def cuts(self, held: int) -> dict[str, int]:
        """Constants of the kernels that run a row a program."""
        return {
            "CHUNK": CHUNK,
            "CHUNKS": self.chunks,
            "GROUP": GROUP,
            "GROUPS": self.groups,
            "TILE": TILE,
            "HELD": held,
            "BLOCK": BLOCK,
            "SHIFT": SHIFTS[self._logits_SV.dtype],
        }


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot draw from logits of this dtype here; None: they can."""
    if dtype not in SHIFTS:
        return f"needs float32, bfloat16 or float16, got {dtype}"
    if device.type == "cpu" and dtype is torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    return launching.unavailable(device)


def make(device: torch.device, dtype: torch.dtype) -> TritonSampling:
    return TritonSampling()


_POINTERS = {
    "maxima_ptr": "*fp32",
    "best_ptr": "*fp32",
    "best_id_ptr": "*i32",
    "mass_ptr": "*i64",
    "before_ptr": "*i32",
    "listed_ptr": "*i32",
    "held_ptr": "*i32",
    "columns_ptr": "*fp64",
    "top_ptr": "*fp32",
    "bad_ptr": "*u8",
    "cut_logit_ptr": "*fp32",
    "cut_id_ptr": "*i64",
    "row_mass_ptr": "*i64",
    "stream_ptr": "*i64",
    "row_ptr": "*i32",
    "position_ptr": "*i32",
    "pool_ptr": "*i32",
    "token_ptr": "*i64",
    "known_ptr": "*i64",
    "logprob_ptr": "*fp32",
    "rank_ptr": "*i64",
    "top_ids_ptr": "*i64",
    "top_logprobs_ptr": "*fp32",
    "work_ptr": "*fp32",
    "bits_ptr": "*i32",
    "rows_ptr": "*i64",
}
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def _variant(
    name: str, kernel: object, dtype: torch.dtype, warps: int, absent: tuple[str, ...] = (), **constexprs: object
) -> AotVariant:
    names = kernel.arg_names  # type: ignore[attr-defined]
    fixed = {**constexprs, **dict.fromkeys(absent)}
    types = {**_POINTERS, "x_ptr": _TYPES[dtype]}
    signature = {arg: "constexpr" if arg in fixed else types.get(arg, "i32") for arg in names}
    return AotVariant(name=name, kernel=kernel, signature=signature, constexprs=fixed, options={"num_warps": warps})


def aot_variants() -> list[AotVariant]:
    """Each kernel for each dtype, with the cuts of a vocabulary of 131072; those that gather, of 8192 in fp32 too."""
    variants = [_variant("argmax", best_kernel, torch.float32, 1, CHUNKS=32)]
    for rows in ((), ("rows_ptr",)):
        variants.append(_variant(f"forbid{'_all' * len(rows)}", forbid_kernel, torch.float32, 4, rows, BLOCK=BLOCK))
    for dtype in SHIFTS:
        tag = _TYPES[dtype][1:]
        cuts = {"CHUNK": CHUNK, "CHUNKS": 32, "GROUP": GROUP}
        many = {"GROUPS": 2048, "TILE": TILE, "HELD": HELD, "BLOCK": BLOCK}
        many |= {"SHIFT": SHIFTS[dtype], **cuts}
        chunks = {"CHUNK": CHUNK, "CHUNKS": 32}
        variants.append(_variant(f"maxima_{tag}", chunk_maxima_kernel, dtype, 8, CHUNK=CHUNK, GROUP=GROUP))
        for static in (False, True):
            eager = ("top_ptr", "cut_logit_ptr", "cut_id_ptr", "row_mass_ptr")
            of_rows = ("stream_ptr", "row_ptr", "position_ptr", "pool_ptr", "bad_ptr")
            name, absent = ("static", eager) if static else ("eager", of_rows)
            no_row = () if static else ("row_ptr",)
            variants.append(
                _variant(f"masses_{name}_{tag}", chunk_masses_kernel, dtype, 4, no_row, STATIC=static, **chunks)
            )
            variants.append(
                _variant(f"draw_{name}_{tag}", draw_kernel, dtype, DRAW_WARPS, absent, STATIC=static, MANY=MANY, **many)
            )
        for known in (("known_ptr",), ()):
            name = "fresh" if known else "known"
            variants.append(_variant(f"ranks_{name}_{tag}", chunk_ranks_kernel, dtype, 4, known, **chunks))
            variants.append(_variant(f"score_{name}_{tag}", score_kernel, dtype, 8, known, **many))
    few = {**many, "SHIFT": SHIFTS[torch.float32], "GROUPS": 128, "CHUNKS": 2}
    variants.append(_variant("score_few_fp32", score_kernel, torch.float32, 8, **few))
    absent = ("top_ptr", "cut_logit_ptr", "cut_id_ptr", "row_mass_ptr")
    variants.append(
        _variant("draw_few_fp32", draw_kernel, torch.float32, DRAW_WARPS, absent, STATIC=True, MANY=MANY, **few)
    )
    return variants
