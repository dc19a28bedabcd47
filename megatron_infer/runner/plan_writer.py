"""Writes a plan into a step's buffer, padded where the step has a shape.

    tokens    | decode: real, padding | prefill chunks | padding |
    sequences | decode: real, padding | prefill: real, empty |
    samples   | decode: real | prefill: those that draw, their forks | padding |

Padding belongs to the dummy row, at position 0: it reads and writes the dummy block, the dummy state slot and token 0
of the dummy row, which nothing else reads. A sequence is an entry of the step; a row, here, is a request's row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.runner.step_buffer import StepBuffer, StepSize, StepViews
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPlan:
    """Where a plan lies in the buffer, and the samples it draws."""

    views: StepViews
    sample_rows: np.ndarray
    """int32 [num_sampled]; never written to again. Samples behind these are padding."""
    sample_positions: np.ndarray
    """int64 [num_sampled]; never written to again."""
    advances: bool
    """The step is the one before with every sequence one token further: `StepBuffer.advance_mirror` is enough."""


class PlanWriter:
    """Writes plans into the buffer's host arrays; a plan that only advances the one before is not written in full."""

    def __init__(self, buffer: StepBuffer, *, dummy_row: int) -> None:
        self._buffer, self._dummy_row = buffer, dummy_row
        self._decode: list[Request] = []
        self._decode_rows: np.ndarray = np.empty(0, dtype=np.int32)
        self._next_starts: np.ndarray | None = None
        """decode_starts of a step that advances the last one, which only decoded; None: it did more, or failed."""
        self._views: StepViews | None = None

    def write(self, plan: StepPlan, shape: GraphShape | None) -> WrittenPlan:
        """Fill the fields of sequences, samples and tokens. The caller uploads or advances the buffer after each call;
        it calls `forget` where it did not."""
        num_decode = len(plan.decode)
        decode = list(plan.decode)
        same = decode == self._decode and not plan.readmitted  # by identity: the set rarely changes between steps
        if not same:
            self._decode = decode
            self._decode_rows = np.fromiter((r.lease.row for r in plan.decode), np.int32, num_decode)  # type: ignore[union-attr]
        starts = np.fromiter(plan.decode_starts, np.int64, num_decode)
        size = StepSize.of(shape) if shape is not None else _exact_size(plan)
        expected, self._next_starts = self._next_starts, None
        views = self._views
        if views is None or views.size != size:
            views = self._views = self._buffer.views(size)
            expected = None
        if plan.prefill:
            _check_fits(plan, size)
            rows, positions = self._write_all(plan, views, starts)
            return WrittenPlan(views=views, sample_rows=rows, sample_positions=positions, advances=False)
        positions = starts + 1
        advances = same and expected is not None and np.array_equal(starts, expected)
        if advances:
            self._buffer.advance_host(num_decode)
        else:
            _check_fits(plan, size)
            self._write_decode(views, starts, num_decode)
            self._pad(views, num_samples=num_decode, num_sequences=size.num_decode, num_tokens=size.num_decode)
        self._next_starts = positions
        return WrittenPlan(views=views, sample_rows=self._decode_rows, sample_positions=positions, advances=advances)

    def forget(self) -> None:
        """Write the next plan in full: the device lacks the last one, or rows changed in a plan not seen here."""
        self._decode, self._decode_rows, self._next_starts = [], np.empty(0, dtype=np.int32), None

    def _write_decode(self, views: StepViews, starts: np.ndarray, num_decode: int) -> None:
        """Decode sequences, those that pad included, and their samples."""
        host, rows, padded = views.host, self._decode_rows, views.size.num_decode
        host["token_position"][:num_decode] = starts
        host["token_row"][:num_decode] = rows
        host["table_row"][:num_decode] = rows
        host["q_len"][:padded] = 1
        host["num_prompt_queries"][:padded] = 0
        host["kv_len"][:num_decode] = starts + 1
        host["cu_q"][: padded + 1] = _ARANGE[: padded + 1] if padded < _ARANGE.size else np.arange(padded + 1)
        host["sample_token"][:num_decode] = host["cu_q"][:num_decode]
        host["sample_row"][:num_decode] = rows
        host["sample_position"][:num_decode] = host["kv_len"][:num_decode]
        if num_decode < padded:
            host["token_position"][num_decode:padded] = 0
            host["token_row"][num_decode:padded] = self._dummy_row
            host["table_row"][num_decode:padded] = self._dummy_row
            host["kv_len"][num_decode:padded] = 1

    def _write_all(self, plan: StepPlan, views: StepViews, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A step with prefill -> (rows, positions) of the tokens it draws."""
        host, num_decode = views.host, len(plan.decode)
        self._write_decode(views, starts, num_decode)
        drawn_rows: list[int] = []
        drawn_positions: list[int] = []
        drawn_tokens: list[int] = []
        offset = views.size.num_decode
        for i, chunk in enumerate(plan.prefill, start=offset):
            lease = chunk.request.lease
            assert lease is not None, f"{chunk.request.id} is planned without a lease"
            end = offset + chunk.n
            host["token_position"][offset:end] = np.arange(chunk.start, chunk.start + chunk.n)
            host["token_row"][offset:end] = lease.row
            host["table_row"][i] = lease.row
            host["q_len"][i] = chunk.n
            host["num_prompt_queries"][i] = min(max(chunk.request.prompt_len - chunk.start, 0), chunk.n)
            host["kv_len"][i] = chunk.start + chunk.n
            host["cu_q"][i + 1] = end
            if chunk.samples:
                num_drafts = len(chunk.drafts)
                for request in (chunk.request, *chunk.forks):
                    drawn_rows += [request.lease.row] * (1 + num_drafts)  # type: ignore[union-attr]
                    drawn_positions += range(chunk.start + chunk.n - num_drafts, chunk.start + chunk.n + 1)
                    drawn_tokens += range(end - 1 - num_drafts, end)
            offset = end
        num_samples = num_decode + len(drawn_rows)
        host["sample_token"][num_decode:num_samples] = drawn_tokens
        host["sample_row"][num_decode:num_samples] = drawn_rows
        host["sample_position"][num_decode:num_samples] = drawn_positions
        num_sequences = views.size.num_decode + len(plan.prefill)
        self._pad(views, num_samples=num_samples, num_sequences=num_sequences, num_tokens=offset)
        return (
            np.concatenate([self._decode_rows, np.array(drawn_rows, dtype=np.int32)]),
            np.concatenate([starts + 1, np.array(drawn_positions, dtype=np.int64)]),
        )

    def _pad(self, views: StepViews, *, num_samples: int, num_sequences: int, num_tokens: int) -> None:
        """Fill everything behind the last real sample, prefill sequence and token."""
        host, size = views.host, views.size
        if num_samples < size.num_samples:
            host["sample_token"][num_samples:] = 0
            host["sample_row"][num_samples:] = self._dummy_row
            host["sample_position"][num_samples:] = 0
        if num_sequences < size.num_sequences:
            host["table_row"][num_sequences:] = self._dummy_row
            for name in ("q_len", "kv_len", "num_prompt_queries"):
                host[name][num_sequences:] = 0
            host["cu_q"][num_sequences + 1 :] = num_tokens
        if num_tokens < size.num_tokens:
            host["token_position"][num_tokens:] = 0
            host["token_row"][num_tokens:] = self._dummy_row


def _exact_size(plan: StepPlan) -> StepSize:
    num_decode = len(plan.decode)
    return StepSize(plan.num_tokens, num_decode + len(plan.prefill), num_decode, len(plan.sampled))


def _check_fits(plan: StepPlan, size: StepSize) -> None:
    num_decode, num_prefill = len(plan.decode), len(plan.prefill)
    fits = (
        num_decode <= size.num_decode
        and num_prefill <= size.num_sequences - size.num_decode
        and plan.num_tokens - num_decode <= size.num_tokens - size.num_decode
        and len(plan.sampled) <= size.num_samples
    )
    assert fits, (
        f"{plan.num_tokens} tokens, {num_decode} decode rows, {num_prefill} chunks, {len(plan.sampled)} drawn; "
        f"padded to {size}"
    )


_ARANGE = np.arange(4097, dtype=np.int32)
