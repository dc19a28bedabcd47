"""A plan as tensors: every field of a step declared once, written into one host buffer, copied to the device once.

    plan (ints)  --numpy-->  host buffer  --one copy-->  device mirror  --gathers-->  ids, cache positions, cos/sin
                                            or: + 1      (a step that only decodes the same rows a token further)

Token ids never travel with a step: they are gathered from the device's token pool [row, position], into which the
sampler writes what it draws and an admission uploads what the host knows.

A step with a shape is padded to it (see `step_rows`); its tensors are then at the same addresses each time, and what
is gathered from them is left to `BatchBuilder.derive`, so that a captured graph can do it when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.base import AttendSpec, AttentionBackend, Ops, RotaryTable, StateCaptures, StepMetadata
from megatron_infer.kernels.ssm import ScanBackend, SsmSpec, SsmWeights
from megatron_infer.kernels.step_gather import Gather, StepTables, torch_gather
from megatron_infer.memory.device import Device
from megatron_infer.memory.layerwise_restore import LayerwiseRestore
from megatron_infer.memory.store import StateTensors
from megatron_infer.runner.row_tensors import RowTensors
from megatron_infer.runner.step_buffer import StepBuffer, StepSize, StepViews
from megatron_infer.runner.step_rows import StepRows
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class Batch:
    """One step on the device: what the model's layers receive as `inference_context` (kernels.base.StepInputs)."""

    meta: StepMetadata
    views: StepViews
    token_ids_T: Tensor
    """int64; made by `BatchBuilder.derive`, as are meta's positions, cache positions and cos/sin."""
    sample_token_S: Tensor
    """int64 index into the step's tokens of each drawn token's position; in a padded step 0 behind the first
    num_sampled, for as many as the shape has rows."""
    sample_row_S: Tensor
    """int32 request row of each drawn token; behind the first num_sampled the dummy row."""
    sample_position_S: Tensor
    """int32 position in its sequence of each token to be drawn; behind the first num_sampled 0."""
    sampled: Sequence[Request]
    sample_rows: np.ndarray
    """int32 request row of each drawn token, num_sampled of them."""
    sample_positions: np.ndarray
    """int64 position in its sequence of each token to be drawn."""
    ops: Ops
    attention: AttentionBackend
    kv_cache: Tensor
    scan: ScanBackend | None
    states: StateTensors | None
    """Recurrent states, of a model that keeps them."""
    max_sequence_length: int
    first_dummy_pos: int
    """Of `meta.kv_pos_T`: the dummy block begins here."""
    routing_TLK: Tensor | None = None
    is_padded: bool = False

    use_flashinfer_fused_rope = False
    materialize_only_last_token_logits = True
    num_speculative_tokens = 0

    @property
    def padding_T1(self) -> Tensor | None:
        """Tokens that pad the step: they are written to the dummy block, which lies behind all others."""
        return (self.meta.kv_pos_T >= self.first_dummy_pos).unsqueeze(1) if self.is_padded else None

    @property
    def num_sampled(self) -> int:
        """Tokens drawn for requests, first among the samples."""
        return len(self.sample_rows)

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


@dataclass(slots=True)
class StageBatch(Batch):
    """A step that begins while the cache comes back: each layer waits, on the device, for what is its own."""

    arrival: LayerwiseRestore | None = None

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        assert self.arrival is not None
        self.arrival.await_layer(("blocks", layer))
        return Batch.attend(self, layer, q_TKGH, k_TKH, v_TKH, spec)

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TH: Tensor, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        assert self.arrival is not None
        self.arrival.await_layer(("states", layer))
        return Batch.ssm(self, layer, xBC_TC, dt_TH, weights, spec)


class Rotations:
    """cos and sin of every position in the activation dtype, on the device."""

    def __init__(self, device: Device, dtype: torch.dtype, max_sequence_length: int) -> None:
        self._device, self._dtype, self._num_positions = device, dtype, max_sequence_length
        self.cos_PR: Tensor | None = None
        self.sin_PR: Tensor | None = None

    def set(self, rotary: RotaryTable | None) -> None:
        """Take these angles from now on: where there were some, into the same memory, which graphs read."""
        cos_PR, sin_PR = self._cast(rotary)
        for name, new in (("cos_PR", cos_PR), ("sin_PR", sin_PR)):
            have: Tensor | None = getattr(self, name)
            # Not of a caller's inference mode: nobody outside of one could write to it.
            with torch.inference_mode(False), torch.no_grad():
                if have is not None and new is not None and have.shape == new.shape:
                    have.copy_(new)
                else:
                    setattr(self, name, new.clone() if new is not None and new.is_inference() else new)

    def differs(self, rotary: RotaryTable | None) -> str | None:
        """What distinguishes the table in use from this one; None: nothing."""
        cos_PR, sin_PR = self._cast(rotary)
        pairs = (("cos", self.cos_PR, cos_PR), ("sin", self.sin_PR, sin_PR))
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
            table[: self._num_positions].to(self._device.torch, self._dtype).contiguous()
            for table in (rotary.cos_PR, rotary.sin_PR)
        )
        return cos_PR, sin_PR


class BatchBuilder:
    """Turns plans into batches; owns the block-table and token-pool mirrors on the device.

    kv_cache and states are asked for at each step: a suspend may have moved them since. A sequence's row is also
    its state slot, so the step's table rows are all that a scan needs to find its states. While a resume's copies run
    a step that is not padded takes the cache layer by layer; a graph has no place to wait in, so that its step comes
    behind all of them.
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
        arrival: Callable[[], LayerwiseRestore | None] = lambda: None,
        shapes: Sequence[GraphShape] = (),
        gather: Gather = torch_gather,
    ) -> None:
        """shapes: those that steps may be padded to."""
        self._buffer = StepBuffer(
            device,
            max_rows=max(max_requests, *(shape.num_rows for shape in shapes), 1),
            max_tokens=max(max_tokens, *(shape.num_tokens for shape in shapes), 1),
            max_writes=max(256, 2 * max_requests + max_tokens // block_size + max_blocks_per_row),
        )
        self.rows = RowTensors(
            device,
            max_requests=max_requests,
            max_blocks=max_blocks_per_row,
            max_sequence_length=max_sequence_length,
            dummy_block=dummy_block,
        )
        self._step_rows = StepRows(self._buffer, dummy_row=self.rows.dummy_row)
        self._block_size, self._first_dummy_pos = block_size, dummy_block * block_size
        self._ops, self._attention, self._kv_cache = ops, attention, kv_cache
        self._scan, self._states, self._gather = scan, states, gather
        self._arrival = arrival
        self._device = device
        self._rotations = Rotations(device, dtype, max_sequence_length)
        self._rotations.set(rotary)
        self._static: dict[GraphShape, StepMetadata] = {}

    @property
    def token_pool(self) -> Tensor:
        """int32 [rows + 1, positions] on the device: the ids of each row's tokens."""
        return self.rows.token_pool

    def set_rotary(self, rotary: RotaryTable | None) -> None:
        """Take these angles from now on: the model's changed."""
        self._rotations.set(rotary)

    def rotary_differs(self, rotary: RotaryTable | None) -> str | None:
        """What distinguishes the table in use from this one; None: nothing."""
        return self._rotations.differs(rotary)

    def build(
        self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]], *, shape: GraphShape | None = None
    ) -> Batch:
        """Bring a step to the device; the batch is valid until the next build.

        With a shape the step is padded to it, and `derive` is left to the caller.
        """
        try:
            written = self._step_rows.write(plan, shape)
            num_writes = self.rows.put_writes(table_writes, self._buffer)
            if written.advances and not num_writes:
                self._buffer.advance_mirror(written.num_sampled)
            else:
                self._buffer.upload(written.views.size, writes=num_writes > 0)
            self.rows.apply_writes(num_writes, self._buffer)
            self.rows.admit(plan)
        except BaseException:
            self._step_rows.forget()
            raise
        first_slice, arrival = written.views.size.num_decode, self._arrival()
        captures = _captures(plan, first_slice)
        if shape is not None:
            batch = self._batch(replace(self._static_meta(shape), captures=captures), written.views)
        else:
            batch = self._batch(self._meta(written.views, captures=captures), written.views, arrival)
        batch.sampled = plan.sampled
        batch.sample_rows, batch.sample_positions = written.sample_rows, written.sample_positions
        if shape is None:
            self.derive(batch)
        return batch

    def static_view(self, shape: GraphShape) -> Batch:
        """The tensors that every step padded to `shape` has; `derive` makes the rest from what they hold when it runs.

        Until the cache is released: kv_cache and states are those of now.
        """
        size = StepSize.of(shape)
        batch = self._batch(replace(self._static_meta(shape)), self._buffer.views(size))
        batch.is_padded = True
        return batch

    def derive(self, batch: Batch) -> None:
        """Gather what the layers need of a step from its mirror, and let the backends plan: device work alone, which a
        graph may capture if the backends are graph-safe."""
        rows, meta, mirror = self.rows, batch.meta, batch.views.mirror
        rotations = self._rotations
        tables = StepTables(rows.block_table, rows.token_pool, self._block_size, rotations.cos_PR, rotations.sin_PR)
        batch.token_ids_T, meta.positions_T, meta.kv_pos_T, meta.cos_TR, meta.sin_TR = self._gather(
            mirror["token_position"], mirror["token_row"], tables
        )
        self._attention.plan(meta)
        if self._scan is not None:
            self._scan.plan(meta)

    def store_drawn(self, batch: Batch, tokens_S: Tensor) -> None:
        """Put drawn tokens where the next step's gather finds them; before the next build.

        tokens_S: num_sampled of them, or as many as the batch has samples.
        """
        count = len(tokens_S)
        self.rows.store(batch.sample_row_S[:count], batch.sample_position_S[:count], tokens_S)

    def store_heard(self, batch: Batch, tokens: np.ndarray) -> None:
        """As `store_drawn`, of int64 tokens that the host was told of; later steps may have been built since."""
        told = (batch.sample_rows, batch.sample_positions, tokens)
        self.rows.store(*(self._device.stage(array) for array in told))

    def _static_meta(self, shape: GraphShape) -> StepMetadata:
        meta = self._static.get(shape)
        if meta is None:
            widest = shape.num_tokens - shape.num_decode if shape.num_prefill else 1
            longest = self.rows.max_blocks * self._block_size
            views = self._buffer.views(StepSize.of(shape))
            meta = self._static[shape] = self._meta(views, max_q_len=widest, max_kv_len=longest)
        return meta

    def _meta(self, views: StepViews, **fields: Any) -> StepMetadata:
        """Without what `derive` fills in."""
        host, mirror, size = views.host, views.mirror, views.size
        return StepMetadata(
            num_tokens=size.num_tokens,
            num_rows=size.num_rows,
            num_decode=size.num_decode,
            q_len=host["q_len"],
            kv_len=host["kv_len"],
            cu_q=host["cu_q"],
            table_row=host["table_row"],
            num_prompt_queries=host["num_prompt_queries"],
            q_len_R=mirror["q_len"],
            kv_len_R=mirror["kv_len"],
            cu_q_R1=mirror["cu_q"],
            table_row_R=mirror["table_row"],
            block_table=self.rows.block_table,
            positions_T=None,  # type: ignore[arg-type]
            kv_pos_T=None,  # type: ignore[arg-type]
            cos_TR=None,
            sin_TR=None,
            **fields,
        )

    def _batch(self, meta: StepMetadata, views: StepViews, arrival: LayerwiseRestore | None = None) -> Batch:
        """Without what `derive` fills in, and with nobody's samples."""
        mirror = views.mirror
        make: Callable[..., Batch] = Batch if arrival is None else partial(StageBatch, arrival=arrival)
        return make(
            meta=meta,
            views=views,
            token_ids_T=None,  # type: ignore[arg-type]
            sample_token_S=mirror["sample_token"],
            sample_row_S=mirror["sample_row"],
            sample_position_S=mirror["sample_position"],
            sampled=(),
            sample_rows=_NO_ROWS,
            sample_positions=_NO_POSITIONS,
            ops=self._ops,
            attention=self._attention,
            kv_cache=self._kv_cache() if arrival is None else arrival.kv_cache,
            scan=self._scan,
            states=self._states() if arrival is None else arrival.states,
            max_sequence_length=self.rows.max_sequence_length,
            first_dummy_pos=self._first_dummy_pos,
        )


def _captures(plan: StepPlan, first_slice: int) -> StateCaptures:
    """Recurrent states to keep on the way through the plan's slices, the first of which is row `first_slice`."""
    kept = [
        (row, position - chunk.start, slot)
        for row, chunk in enumerate(plan.prefill, start=first_slice)
        for position, slot in chunk.captures
    ]
    if not kept:
        return _NO_CAPTURES
    row, num_tokens, state_slot = np.array(kept, dtype=np.int32).T.copy()
    return StateCaptures(row=row, num_tokens=num_tokens, state_slot=state_slot)


_NO_CAPTURES = StateCaptures()
_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_POSITIONS = np.empty(0, dtype=np.int64)
