"""The device's tables of every request row: blocks, token ids, adapter; kept from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.memory.device import Device
from megatron_infer.runner.step_buffer import StepBuffer
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan


class RowTensors:
    """Block table and token pool of all request rows and, last, of the dummy row that padding belongs to."""

    def __init__(self, device: Device, sizes: ResolvedSizes, *, dummy_block: int) -> None:
        self._device = device
        self.dummy_row = sizes.max_requests
        self.max_blocks, self.max_sequence_length = sizes.max_blocks_per_row, sizes.max_sequence_length
        num_rows = sizes.max_requests + 1
        self.block_table = torch.full((num_rows, self.max_blocks), dummy_block, dtype=torch.int32, device=device.torch)
        """int32 [rows + 1, blocks]."""
        self.token_pool = torch.zeros((num_rows, self.max_sequence_length), dtype=torch.int32, device=device.torch)
        """int32 [rows + 1, positions]: token ids."""
        self.adapter_slot_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device.torch)
        """int32 [rows + 1]: where the device has the adapter of a row's sequence; -1: it has none."""
        self._adapter_slots: np.ndarray = np.full(num_rows, -1, dtype=np.int32)
        self.flat_table, self.flat_pool = self.block_table.view(-1), self.token_pool.view(-1)

    # ------------------------------------------------------------------ block table

    def put_writes(self, writes: Sequence[tuple[int, int, int]], buffer: StepBuffer) -> int:
        """Write (row, column, block) into the step's buffer -> how many; what has no room there is applied at once."""
        if not writes:
            return 0
        # A dict keeps the last of several writes to one place; a device scatter promises no order.
        table = {row * self.max_blocks + column: block for row, column, block in writes}
        at = np.fromiter(table.keys(), np.int64, len(table))
        block = np.fromiter(table.values(), np.int32, len(table))
        early = len(at) - len(buffer.host["write_at"])
        if early > 0:
            self.flat_table.index_copy_(0, self._device.to_device(at[:early]), self._device.to_device(block[:early]))
            at, block = at[early:], block[early:]
        buffer.host["write_at"][: len(at)] = at
        buffer.host["write_block"][: len(at)] = block
        return len(at)

    def apply_writes(self, num_writes: int, buffer: StepBuffer) -> None:
        """Apply the uploaded writes to the table."""
        if num_writes:
            at, block = buffer.mirror["write_at"][:num_writes], buffer.mirror["write_block"][:num_writes]
            self.flat_table.index_copy_(0, at, block)

    # ------------------------------------------------------------------ adapters

    def has_adapters(self, rows: np.ndarray) -> bool:
        """Whether the sequence of one of these rows has an adapter."""
        return bool((self._adapter_slots[rows] >= 0).any())

    def put_adapter_slots(self, requests: Iterable[Request]) -> None:
        """Write where the device has the adapters of these requests' leases."""
        changed: dict[int, int] = {}
        for request in requests:
            lease = request.lease
            assert lease is not None, f"{request.id} is planned without a lease"
            if self._adapter_slots[lease.row] != lease.adapter_slot:
                changed[lease.row] = lease.adapter_slot
        if changed:
            rows, slots = np.array(list(changed), dtype=np.int64), np.array(list(changed.values()), dtype=np.int32)
            self._adapter_slots[rows] = slots
            self.adapter_slot_R.index_copy_(0, self._device.to_device(rows), self._device.to_device(slots))

    # ------------------------------------------------------------------ tokens

    def admit(self, plan: StepPlan) -> None:
        """Upload drafts and all tokens of newly admitted requests, the cached prefix too (penalties count them)."""
        admitted = [*plan.readmitted, *(chunk.request for chunk in plan.prefill if chunk.first)]
        runs: list[tuple[Request, int, Sequence[int]]] = [(request, 0, request.tokens) for request in admitted]
        runs += [(chunk.request, chunk.start + 1, chunk.drafts) for chunk in plan.prefill if chunk.drafts]
        if runs:
            self._put_tokens(runs)
        forked = [fork for chunk in plan.prefill for fork in chunk.forks]
        self.put_adapter_slots([*admitted, *forked])
        for chunk in plan.prefill:
            if chunk.forks:
                end = chunk.start + chunk.n
                rows = np.fromiter((fork.lease.row for fork in chunk.forks), np.int64, len(chunk.forks))  # type: ignore[union-attr]
                shared_1P = self.token_pool[chunk.request.lease.row, :end].unsqueeze(0)  # type: ignore[union-attr]
                # a copy: index_copy_ may not read memory that it writes to
                self.token_pool[:, :end].index_copy_(0, self._device.to_device(rows), shared_1P.repeat(len(rows), 1))

    def _put_tokens(self, runs: Sequence[tuple[Request, int, Sequence[int]]]) -> None:
        """Upload runs of tokens (request, first position, ids) by one copy and one scatter."""
        tokens = np.concatenate([np.array(ids, dtype=np.int32) for _, _, ids in runs])
        first = np.array([one.lease.row * self.max_sequence_length + start for one, start, _ in runs], dtype=np.int64)  # type: ignore[union-attr]
        lengths = np.array([len(ids) for _, _, ids in runs])
        before = np.cumsum(lengths) - lengths
        at = np.arange(len(tokens)) + np.repeat(first - before, lengths)
        bytes_B = self._device.to_device(np.concatenate([at.view(np.uint8), tokens.view(np.uint8)]))
        at_N, token_N = bytes_B[: at.nbytes].view(torch.int64), bytes_B[at.nbytes :].view(torch.int32)
        self.flat_pool.index_copy_(0, at_N, token_N)

    def store(self, row_S: Tensor, position_S: Tensor, token_S: Tensor) -> None:
        """Write drawn tokens into the token pool, where the next step's gather reads them."""
        at_S = torch.add(position_S, row_S.long(), alpha=self.max_sequence_length)
        self.flat_pool.index_copy_(0, at_S, token_S.to(torch.int32))
