"""A plan as tensors: every field of a step declared once, written into one host buffer, copied to the device once.

    plan (ints)  --numpy-->  host buffer  --one copy-->  device mirror  --gathers-->  ids, cache positions, cos/sin

Token ids never travel with a step: they are gathered from the device's token pool [row, position], into which the
sampler writes what it draws and an admission uploads what the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.context.store import StateTensors
from megatron_infer.forward.device import Device
from megatron_infer.kernels.base import AttendSpec, AttentionBackend, Ops, RotaryTable, StateCaptures, StepMetadata
from megatron_infer.kernels.ssm import ScanBackend, SsmSpec, SsmWeights
from megatron_infer.schedule.plan import Plan
from megatron_infer.schedule.request import Request

# (field, dtype, capacity in units of: R rows, R1 rows + 1, T tokens, W table writes). `token` is last, so that a step
# copies only as much of it as it has tokens.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("sample_token", "int64", "R"),
    ("write_at", "int64", "W"),
    ("write_block", "int32", "W"),
    ("q_len", "int32", "R"),
    ("kv_len", "int32", "R"),
    ("table_row", "int32", "R"),
    ("num_prompt_queries", "int32", "R"),
    ("cu_q", "int32", "R1"),
    ("token", "int64", "T"),
)
ROW_SHIFT = 32
"""`token` holds row << 32 | position: one array, so that what a step uses of it is one run of bytes."""


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

        self._token_offset = offset - np.dtype("int64").itemsize * capacity["T"]

    def upload(self, num_tokens: int) -> None:
        """One copy: every field whole, `token` as far as it is used."""
        end = self._token_offset + np.dtype("int64").itemsize * num_tokens
        self._device.upload(self._host[:end], self._mirror[:end])


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
    scan: ScanBackend | None
    states: StateTensors | None
    """Recurrent states, of a model that keeps them."""
    max_sequence_length: int
    routing_TLK: Tensor | None = None

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

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TH: Tensor, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        assert self.scan is not None and self.states is not None, "a Mamba layer in a model adopted without any"
        return self.scan.run(xBC_TC, dt_TH, self.states.layer(layer), weights, spec)

    # What megatron-core's stacks and models ask of a context while a step runs (reference: its GPTModel.forward).
    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        return self.meta.num_decode == self.meta.num_rows

    def last_token_logits(self, hidden_1TD: Tensor) -> Tensor:
        """[1, T, D] -> the rows that draw a token, [S, D] (the second entry, GPTModel.forward)."""
        return hidden_1TD.squeeze(0).index_select(0, self.sample_token_S)


class BatchBuilder:
    """Turns plans into batches; owns the block-table and token-pool mirrors on the device.

    kv_cache and states are asked for at each step: a suspend may have moved them since. A sequence's row is also
    its state slot, so the step's table rows are all that a scan needs to find its states.
    """

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
        kv_cache: Callable[[], Tensor],
        rotary: RotaryTable | None,
        dtype: torch.dtype,
        scan: ScanBackend | None = None,
        states: Callable[[], StateTensors | None] = lambda: None,
    ) -> None:
        self._max_writes = max(256, 2 * max_requests + max_tokens // block_size + max_blocks_per_row)
        capacity = {"R": max_requests, "R1": max_requests + 1, "T": max_tokens, "W": self._max_writes}
        self._device = device
        self._buffer = StepBuffer(device, capacity)
        self.block_table = torch.full(
            (max_requests + 1, max_blocks_per_row), dummy_block, dtype=torch.int32, device=device.torch
        )
        self.token_pool = torch.zeros((max_requests + 1, max_sequence_length), dtype=torch.int32, device=device.torch)
        self._flat_table, self._flat_pool = self.block_table.view(-1), self.token_pool.view(-1)
        self._block_size, self._max_blocks = block_size, max_blocks_per_row
        self._max_sequence_length = max_sequence_length
        self._ops, self._attention, self._kv_cache = ops, attention, kv_cache
        self._scan, self._states = scan, states
        self._dtype = dtype
        self._cos_PR, self._sin_PR = self._cast(rotary)
        self._decode: list[Request] = []
        self._decode_rows = np.empty(0, dtype=np.int64)

    def set_rotary(self, rotary: RotaryTable | None) -> None:
        """Take these angles from now on: the model's changed."""
        self._cos_PR, self._sin_PR = self._cast(rotary)

    def rotary_differs(self, rotary: RotaryTable | None) -> str | None:
        """What distinguishes the table in use from this one; None: nothing."""
        cos_PR, sin_PR = self._cast(rotary)
        pairs = (("cos", self._cos_PR, cos_PR), ("sin", self._sin_PR, sin_PR))
        for name, have, want in pairs:
            if (have is None) != (want is None) or (
                have is not None and want is not None and not torch.equal(have, want)
            ):
                return name
        return None

    def _cast(self, rotary: RotaryTable | None) -> tuple[Tensor | None, Tensor | None]:
        if rotary is None:
            return None, None
        cos_PR, sin_PR = (
            table[: self._max_sequence_length].to(self._device.torch, self._dtype).contiguous()
            for table in (rotary.cos_PR, rotary.sin_PR)
        )
        return cos_PR, sin_PR

    def build(self, plan: Plan, table_writes: Sequence[tuple[int, int, int]]) -> Batch:
        """Write, copy and gather; the batch is valid until the next build."""
        host, mirror = self._buffer.host, self._buffer.mirror
        num_decode, num_rows = len(plan.decode), len(plan.decode) + len(plan.prefill)
        sample_rows, sample_positions = self._write_rows(plan, host, num_decode, num_rows)
        num_writes = self._write_table(table_writes, host)
        num_tokens = plan.num_tokens
        self._buffer.upload(num_tokens)
        if num_writes:
            self._flat_table.index_copy_(0, mirror["write_at"][:num_writes], mirror["write_block"][:num_writes])
        self._upload_admitted(plan)

        token_T = mirror["token"][:num_tokens]
        row_T, positions_T = token_T >> ROW_SHIFT, token_T & ((1 << ROW_SHIFT) - 1)
        block_T = self._flat_table.index_select(0, row_T * self._max_blocks + positions_T // self._block_size)
        ids_T = self._flat_pool.index_select(0, row_T * self._max_sequence_length + positions_T)
        meta = StepMetadata(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode=num_decode,
            q_len=host["q_len"][:num_rows],
            kv_len=host["kv_len"][:num_rows],
            cu_q=host["cu_q"][: num_rows + 1],
            table_row=host["table_row"][:num_rows],
            num_prompt_queries=host["num_prompt_queries"][:num_rows],
            q_len_R=mirror["q_len"][:num_rows],
            kv_len_R=mirror["kv_len"][:num_rows],
            cu_q_R1=mirror["cu_q"][: num_rows + 1],
            table_row_R=mirror["table_row"][:num_rows],
            block_table=self.block_table,
            positions_T=positions_T,
            kv_pos_T=block_T.long() * self._block_size + positions_T % self._block_size,
            cos_TR=None if self._cos_PR is None else self._cos_PR.index_select(0, positions_T),
            sin_TR=None if self._sin_PR is None else self._sin_PR.index_select(0, positions_T),
            captures=_captures(plan),
        )
        self._attention.plan(meta)
        if self._scan is not None:
            self._scan.plan(meta)
        return Batch(
            meta=meta,
            token_ids_T=ids_T.long(),
            sample_token_S=mirror["sample_token"][: len(sample_rows)],
            sampled=plan.sampled,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            ops=self._ops,
            attention=self._attention,
            kv_cache=self._kv_cache(),
            scan=self._scan,
            states=self._states(),
            max_sequence_length=self._max_sequence_length,
        )

    def store_drawn(self, batch: Batch, tokens_S: Tensor) -> None:
        """Put drawn tokens where the next step's gather finds them."""
        at = batch.sample_rows.astype(np.int64) * self._max_sequence_length + batch.sample_positions
        self._flat_pool.index_copy_(
            0, torch.from_numpy(at).to(self._device.torch, non_blocking=True), tokens_S.to(torch.int32)
        )

    def _write_rows(
        self, plan: Plan, host: dict[str, np.ndarray], num_decode: int, num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the per-row and per-token fields -> (sample_rows, sample_positions)."""
        decode = list(plan.decode)
        if decode != self._decode:  # compares members by identity: the set rarely changes between steps
            self._decode = decode
            self._decode_rows = np.fromiter((r.lease.row for r in plan.decode), np.int64, num_decode)  # type: ignore[union-attr]
        starts = np.fromiter(plan.decode_starts, np.int64, num_decode)
        host["token"][:num_decode] = (self._decode_rows << ROW_SHIFT) | starts
        host["table_row"][:num_decode] = self._decode_rows
        host["q_len"][:num_decode] = 1
        host["num_prompt_queries"][:num_decode] = 0
        host["kv_len"][:num_decode] = starts + 1
        host["cu_q"][: num_decode + 1] = (
            _ARANGE[: num_decode + 1] if num_decode < _ARANGE.size else np.arange(num_decode + 1)
        )
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
            host["token"][offset:end] = np.arange(piece.start, piece.start + piece.n) | lease.row << ROW_SHIFT
            host["table_row"][i] = lease.row
            host["q_len"][i] = piece.n
            host["num_prompt_queries"][i] = min(max(piece.request.prompt_len - piece.start, 0), piece.n)
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
        # A dict keeps the last of several writes to one place; a device scatter promises no order.
        table = {row * self._max_blocks + column: block for row, column, block in writes}
        at = np.fromiter(table.keys(), np.int64, len(table))
        block = np.fromiter(table.values(), np.int32, len(table))
        while len(at) > self._max_writes:
            early = torch.from_numpy(at[: self._max_writes].copy()), torch.from_numpy(block[: self._max_writes].copy())
            self._flat_table.index_copy_(0, *(tensor.to(self._device.torch) for tensor in early))
            at, block = at[self._max_writes :], block[self._max_writes :]
        host["write_at"][: len(at)] = at
        host["write_block"][: len(at)] = block
        return len(at)

    def _upload_admitted(self, plan: Plan) -> None:
        """Give newly admitted rows every token the host knows, cached prefix included (penalties count them)."""
        for request in plan.returned:
            known = torch.tensor(request.tokens, dtype=torch.int32)
            self.token_pool[request.lease.row, : len(known)] = known.to(self._device.torch, non_blocking=True)  # type: ignore[union-attr]
        for piece in plan.prefill:
            row = piece.request.lease.row  # type: ignore[union-attr]
            if piece.first:
                known = torch.tensor(piece.request.tokens, dtype=torch.int32)
                self.token_pool[row, : len(known)] = known.to(self._device.torch, non_blocking=True)
            if piece.forks:
                end = piece.start + piece.n
                for fork in piece.forks:
                    self.token_pool[fork.lease.row, :end] = self.token_pool[row, :end]  # type: ignore[union-attr]


def _captures(plan: Plan) -> StateCaptures:
    """Recurrent states to keep on the way through the plan's slices."""
    kept = [
        (row, position - piece.start, slot)
        for row, piece in enumerate(plan.prefill, start=len(plan.decode))
        for position, slot in piece.captures
    ]
    if not kept:
        return _NO_CAPTURES
    row, num_tokens, state_slot = np.array(kept, dtype=np.int32).T.copy()
    return StateCaptures(row=row, num_tokens=num_tokens, state_slot=state_slot)


_NO_CAPTURES = StateCaptures()
_ARANGE = np.arange(4097, dtype=np.int32)
