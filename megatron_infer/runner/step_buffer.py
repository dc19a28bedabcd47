"""A step's integers: host arrays and their device mirror, laid out so that one copy of contiguous bytes uploads them.

    [ table writes | sequences: samples, lengths, rows | sample_position, kv_len | token_position, token_row ]
    ^ from here where there are any                      `--- rise by one ------------------'       used ^
                   ^ else from here                           when a step only advances

Legend: S drawn tokens, R sequences of the step, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.memory.device import Device

ALIGNMENT = 16
"""Bytes: every field begins at a multiple of it, which kernels may then load four int32 at a time from."""
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("write_at", "int64", "W"),
    ("write_block", "int32", "W"),
    ("sample_token", "int64", "R"),
    ("sample_row", "int32", "R"),
    ("q_len", "int32", "R"),
    ("table_row", "int32", "R"),
    ("cu_q", "int32", "R1"),
    ("sample_position", "int32", "R"),
    ("kv_len", "int32", "R"),
    ("token", "int32", "2T"),
)
"""(field, dtype, capacity: R sequences, R1 sequences + 1, 2T two for each token, W table writes)."""
FIRST_OF_SEQUENCES, FIRST_TO_ADVANCE = "sample_token", "sample_position"


class StepSize(NamedTuple):
    """How much of each field a step uses. Steps of equal size have their fields at equal addresses."""

    num_tokens: int
    num_sequences: int
    num_decode: int
    num_samples: int

    @classmethod
    def of(cls, shape: GraphShape) -> StepSize:
        return cls(shape.num_tokens, shape.num_rows, shape.num_decode, shape.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepViews:
    """The used part of every field, on the host and (the last four aside) on the device."""

    size: StepSize
    host: dict[str, np.ndarray]
    mirror: dict[str, Tensor]


class StepBuffer:
    """Memory for the largest step, at fixed addresses. Host arrays may be written to as soon as an upload has begun."""

    def __init__(self, device: Device, *, max_sequences: int, max_tokens: int, max_writes: int) -> None:
        units = {"R": max_sequences, "R1": max_sequences + 1, "W": max_writes}
        units["2T"] = max(2 * max_tokens, max_sequences) + 4
        sizes = [(name, dtype, units[unit]) for name, dtype, unit in FIELDS]
        total = sum(_aligned(np.dtype(dtype).itemsize * count) for _, dtype, count in sizes)
        self._device = device
        self._host: np.ndarray = np.zeros(total, dtype=np.uint8)
        self._mirror = device.device_buffer(total)
        self.host: dict[str, np.ndarray] = {"num_prompt_queries": np.zeros(max_sequences, dtype=np.int32)}
        self.mirror: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        offset = 0
        for name, dtype, count in sizes:
            end = offset + np.dtype(dtype).itemsize * count
            self._starts[name] = offset
            self.host[name] = self._host[offset:end].view(dtype)
            self.mirror[name] = self._mirror[offset:end].view(getattr(torch, dtype))
            offset = _aligned(end)
        # sample_position, kv_len and the first tokens' positions as three rows of one strided array
        pitch, first = _aligned(4 * max_sequences) // 4, self._starts[FIRST_TO_ADVANCE]
        self._rising_host_3R = np.lib.stride_tricks.as_strided(
            self._host[first:].view(np.int32), (3, max_sequences), (4 * pitch, 4)
        )
        self._rising_3R = self._mirror[first:].view(torch.int32).as_strided((3, max_sequences), (pitch, 1))

    def views(self, size: StepSize) -> StepViews:
        """The fields of a step of this size."""
        num_tokens, num_sequences, _, num_samples = size
        ends = {
            "sample_token": num_samples,
            "sample_row": num_samples,
            "sample_position": num_samples,
            "q_len": num_sequences,
            "kv_len": num_sequences,
            "table_row": num_sequences,
            "cu_q": num_sequences + 1,
        }
        host, mirror = self.host, self.mirror
        host_views = {name: host[name][:end] for name, end in ends.items()}
        mirror_views = {name: mirror[name][:end] for name, end in ends.items()}
        host_views["num_prompt_queries"] = host["num_prompt_queries"][:num_sequences]
        row = _row_offset(num_tokens)
        host_views["token_position"], mirror_views["token_position"] = (
            host["token"][:num_tokens],
            mirror["token"][:num_tokens],
        )
        host_views["token_row"], mirror_views["token_row"] = (
            host["token"][row : row + num_tokens],
            mirror["token"][row : row + num_tokens],
        )
        return StepViews(size=size, host=host_views, mirror=mirror_views)

    def upload(self, size: StepSize, *, writes: bool) -> None:
        """Upload what a step uses by one copy; writes: the table writes too."""
        first = 0 if writes else self._starts[FIRST_OF_SEQUENCES]
        end = self._starts["token"] + 4 * (_row_offset(size.num_tokens) + size.num_tokens)
        self._device.upload(self._host[first:end], self._mirror[first:end])

    def advance_host(self, num_decode: int) -> None:
        """Advance a step that only decodes by one token, on the host."""
        rising_3R = self._rising_host_3R[:, :num_decode]
        rising_3R += 1

    def advance_mirror(self, num_decode: int) -> None:
        """The same on the device, instead of an upload."""
        self._rising_3R[:, :num_decode].add_(1)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _row_offset(num_tokens: int) -> int:
    """Where in `token` the row of each token begins, behind the positions."""
    return _aligned(4 * num_tokens) // 4
