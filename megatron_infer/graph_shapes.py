"""Shapes that steps are padded to so that one captured CUDA graph serves many of them. Pure: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class GraphShape:
    """A padded step: tokens in all, rows that prefill, rows that decode (one token each, first)."""

    num_tokens: int
    num_prefill: int
    num_decode: int

    @property
    def num_rows(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def is_decode_only(self) -> bool:
        return self.num_prefill == 0
