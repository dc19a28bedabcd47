"""A plan as tensors: every field of a step declared once, written into one host buffer, copied to the device once.

    plan (ints)  --numpy-->  host buffer  --one copy-->  device mirror  --gathers-->  ids, cache positions, cos/sin

Token ids never travel with a step: they are gathered from the device's token pool [row, position], into which the
sampler writes what it draws and an admission uploads what the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.forward.device import Device
from megatron_infer.kernels.base import AttendSpec, AttentionBackend, Ops, RotaryTable, StepMetadata
from megatron_infer.schedule.plan import Plan
from megatron_infer.schedule.request import Request

# (field, dtype, capacity in units of: R rows, R1 rows + 1, T tokens, W table writes)
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("positions", "int64", "T"),
    ("token_row", "int64", "T"),
    ("sample_token", "int64", "R"),
    ("q_len", "int32", "R"),
    ("kv_len", "int32", "R"),
    ("table_row", "int32", "R"),
    ("cu_q", "int32", "R1"),
    ("write_row", "int64", "W"),
    ("write_column", "int64", "W"),
    ("write_block", "int32", "W"),
)


class StepBuffer:
    """One host buffer and its device mirror, cut into the declared fields at fixed addresses."""

    def __init__(self, device: Device, capacity: dict[str, int]) -> None:
        sizes = [(name, dtype, capacity[unit]) for name, dtype, unit in FIELDS]
        total = sum(-(-np.dtype(dtype).itemsize * count // 8) * 8 for _, dtype, count in sizes)
        self._device = device
        self._host = device.host_buffer(total)
        self._mirror = device.device_buffer(total)
        self.host: dict[str, np.ndarray] = {}
        self.mirror: dict[str, Tensor] = {}
        offset = 0
        for name, dtype, count in sizes:
            end = offset + np.dtype(dtype).itemsize * count
            self.host[name] = self._host[offset:end].numpy().view(dtype)
            self.mirror[name] = self._mirror[offset:end].view(getattr(torch, dtype))
            offset = -(-end // 8) * 8

    def upload(self) -> None:
        self._device.upload(self._host, self._mirror)


@dataclass(slots=True)
class Batch:
    """One step on the device: what the model's layers receive as `inference_context` (kernels.base.StepInputs)."""

    meta: StepMetadata
    token_ids_T: Tensor
    sample_token_S: Tensor
    """int64 index into the step's tokens of each drawn token's position."""
    sampled: Sequence[Request]
    sample_rows: np.ndarray
    """int32 request row of each drawn token."""
    sample_positions: np.ndarray
    """int64 position in its sequence of each token to be drawn."""
    ops: Ops
    attention: AttentionBackend
    kv_cache: Tensor
    max_sequence_length: int

    use_flashinfer_fused_rope = False
    materialize_only_last_token_logits = True
    num_speculative_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self.meta.num_tokens

    @property
    def positions_T(self) -> Tensor:
        return self.meta.positions_T

    @property
    def config(self) -> Batch:
        """megatron-core 0.19 reads the context's flags through `context.config`."""
        return self

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        return self.attention.run(q_TKGH, k_TKH, v_TKH, self.kv_cache, layer=layer, spec=spec)

    # What megatron-core's stacks and models ask of a context while a step runs (reference: its GPTModel.forward).
    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        return self.meta.num_decode == self.meta.num_rows

    def using_cuda_graph_this_step(self) -> bool:
        return False

    def last_token_logits(self, hidden_1TD: Tensor) -> Tensor:
        """[1, T, D] -> the rows that draw a token, [S, D] (the second entry, GPTModel.forward)."""
        return hidden_1TD.squeeze(0).index_select(0, self.sample_token_S)


class BatchBuilder:
    """Turns plans into batches; owns the block-table and token-pool mirrors on the device."""

    def __init__(
        self,
        *,
        device: Device,
        max_requests: int,
        max_tokens: int,
        max_blocks_per_row: int,
        max_sequence_length: int,
        block_size: int,
        dummy_block: int,
        ops: Ops,
        attention: AttentionBackend,
        kv_cache: Tensor,
        rotary: RotaryTable | None,
        dtype: torch.dtype,
    ) -> None:
        self._max_writes = max(256, 2 * max_requests + max_tokens // block_size + max_blocks_per_row)
        capacity = {"R": max_requests, "R1": max_requests + 1, "T": max_tokens, "W": self._max_writes}
        self._device = device
        self._buffer = StepBuffer(device, capacity)
        self.block_table = torch.full(
            (max_requests + 1, max_blocks_per_row), dummy_block, dtype=torch.int32, device=device.torch
        )
        self.token_pool = torch.zeros((max_requests + 1, max_sequence_length), dtype=torch.int32, device=device.torch)
        self._block_size = block_size
        self._max_sequence_length = max_sequence_length
        self._ops, self._attention, self._kv_cache = ops, attention, kv_cache
        self._cos_PR = self._sin_PR = None
        if rotary is not None:
            self._cos_PR = rotary.cos_PR[:max_sequence_length].to(device.torch, dtype).contiguous()
            self._sin_PR = rotary.sin_PR[:max_sequence_length].to(device.torch, dtype).contiguous()
        self._decode: list[Request] = []
        self._decode_rows = np.empty(0, dtype=np.int64)

    def build(self, plan: Plan, table_writes: Sequence[tuple[int, int, int]]) -> Batch:
        """Write, copy and gather; the batch is valid until the next build."""
        host, mirror = self._buffer.host, self._buffer.mirror
        num_decode, num_rows = len(plan.decode), len(plan.decode) + len(plan.prefill)
        sample_rows, sample_positions = self._write_rows(plan, host, num_decode, num_rows)
        num_writes = self._write_table(table_writes, host)
        self._buffer.upload()
        if num_writes:
            self.block_table[mirror["write_row"][:num_writes], mirror["write_column"][:num_writes]] = mirror[
                "write_block"
            ][:num_writes]
        self._upload_admitted(plan)

        num_tokens = plan.num_tokens
        positions_T = mirror["positions"][:num_tokens]
        row_T = mirror["token_row"][:num_tokens]
        block_T = self.block_table[row_T, positions_T // self._block_size]
        meta = StepMetadata(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode=num_decode,
            q_len=host["q_len"][:num_rows],
            kv_len=host["kv_len"][:num_rows],
            cu_q=host["cu_q"][: num_rows + 1],
            table_row=host["table_row"][:num_rows],
            q_len_R=mirror["q_len"][:num_rows],
            kv_len_R=mirror["kv_len"][:num_rows],
            cu_q_R1=mirror["cu_q"][: num_rows + 1],
            table_row_R=mirror["table_row"][:num_rows],
            block_table=self.block_table,
            positions_T=positions_T,
            kv_pos_T=block_T.long() * self._block_size + positions_T % self._block_size,
            cos_TR=None if self._cos_PR is None else self._cos_PR.index_select(0, positions_T),
            sin_TR=None if self._sin_PR is None else self._sin_PR.index_select(0, positions_T),
        )
        self._attention.plan(meta)
        return Batch(
            meta=meta,
            token_ids_T=self.token_pool[row_T, positions_T].long(),
            sample_token_S=mirror["sample_token"][: len(sample_rows)],
            sampled=plan.sampled,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            ops=self._ops,
            attention=self._attention,
            kv_cache=self._kv_cache,
            max_sequence_length=self._max_sequence_length,
        )

    def store_drawn(self, batch: Batch, tokens_S: Tensor) -> None:
        """Put drawn tokens where the next step's gather finds them."""
        rows = torch.from_numpy(batch.sample_rows.astype(np.int64)).to(self._device.torch, non_blocking=True)
        positions = torch.from_numpy(batch.sample_positions).to(self._device.torch, non_blocking=True)
        self.token_pool[rows, positions] = tokens_S.to(torch.int32)

    def _write_rows(
        self, plan: Plan, host: dict[str, np.ndarray], num_decode: int, num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the per-row and per-token fields -> (sample_rows, sample_positions)."""
        decode = list(plan.decode)
        if decode != self._decode:  # compares members by identity: the set rarely changes between steps
            self._decode = decode
            self._decode_rows = np.fromiter((r.lease.row for r in plan.decode), np.int64, num_decode)  # type: ignore[union-attr]
        starts = np.fromiter(plan.decode_starts, np.int64, num_decode)
        host["positions"][:num_decode] = starts
        host["token_row"][:num_decode] = self._decode_rows
        host["table_row"][:num_decode] = self._decode_rows
        host["q_len"][:num_decode] = 1
        host["kv_len"][:num_decode] = starts + 1
        host["cu_q"][: num_decode + 1] = _ARANGE[: num_decode + 1] if num_decode < _ARANGE.size else np.arange(num_decode + 1)
        host["sample_token"][:num_decode] = host["cu_q"][:num_decode]
        sample_rows = self._decode_rows.astype(np.int32)
        if not plan.prefill:
            return sample_rows, starts + 1
        extra_rows: list[int] = []
        extra_positions: list[int] = []
        extra_tokens: list[int] = []
        offset = num_decode
        for i, piece in enumerate(plan.prefill, start=num_decode):
            lease = piece.request.lease
            assert lease is not None, f"{piece.request.id} is planned without a lease"
            end = offset + piece.n
            host["positions"][offset:end] = np.arange(piece.start, piece.start + piece.n)
            host["token_row"][offset:end] = lease.row
            host["table_row"][i] = lease.row
            host["q_len"][i] = piece.n
            host["kv_len"][i] = piece.start + piece.n
            host["cu_q"][i + 1] = end
            if piece.samples:
                for request in (piece.request, *piece.forks):
                    extra_rows.append(request.lease.row)  # type: ignore[union-attr]
                    extra_positions.append(piece.start + piece.n)
                    extra_tokens.append(end - 1)
            offset = end
        host["sample_token"][num_decode : num_decode + len(extra_tokens)] = extra_tokens
        return (
            np.concatenate([sample_rows, np.asarray(extra_rows, np.int32)]),
            np.concatenate([starts + 1, np.asarray(extra_positions, np.int64)]),
        )

    def _write_table(self, writes: Sequence[tuple[int, int, int]], host: dict[str, np.ndarray]) -> int:
        """Stage block-table writes for the step's copy; what does not fit there goes ahead in a copy of its own."""
        if not writes:
            return 0
        table = np.asarray(writes, dtype=np.int64)
        while len(table) > self._max_writes:
            early, table = table[: self._max_writes], table[self._max_writes :]
            row, column, block = torch.from_numpy(early.T.copy()).to(self._device.torch)
            self.block_table[row, column] = block.to(torch.int32)
        # Of two writes to one place the later one counts; an index_put_ does not promise an order.
        if len(table) > 1:
            key = table[:, 0] * self.block_table.shape[1] + table[:, 1]
            _, last = np.unique(key[::-1], return_index=True)
            if len(last) < len(table):
                table = table[np.sort(len(table) - 1 - last)]
        count = len(table)
        host["write_row"][:count] = table[:, 0]
        host["write_column"][:count] = table[:, 1]
        host["write_block"][:count] = table[:, 2]
        return count

    def _upload_admitted(self, plan: Plan) -> None:
        """Give newly admitted rows every token the host knows, cached prefix included (penalties count them)."""
        for piece in plan.prefill:
            row = piece.request.lease.row  # type: ignore[union-attr]
            if piece.first:
                known = torch.tensor(piece.request.tokens, dtype=torch.int32)
                self.token_pool[row, : len(known)] = known.to(self._device.torch, non_blocking=True)
            if piece.forks:
                end = piece.start + piece.n
                for fork in piece.forks:
                    self.token_pool[fork.lease.row, :end] = self.token_pool[row, :end]  # type: ignore[union-attr]


_ARANGE = np.arange(4097, dtype=np.int32)
