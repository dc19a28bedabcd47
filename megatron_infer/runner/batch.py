"""A plan as tensors: every field of a step is declared once, written into one host buffer and uploaded by one copy.

    plan (ints)  --numpy-->  host buffer  --one copy-->  device mirror  --gathers-->  ids, cache positions, cos/sin
                                            or: + 1      (a step that only advances the decode rows of the last one)

Token ids are not uploaded with a step: they are gathered from the device's token pool [row, position], into which the
sampler writes its tokens and an admission uploads the prompt.

A step with a shape is padded to it (see `plan_writer`); its tensors are then at the same addresses each time, and what
is gathered from them is left to `BatchBuilder.derive`, so that a captured graph can repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.base import (
    AttendSpec,
    AttentionBackend,
    IndexQueries,
    Ops,
    RotaryTable,
    SparseAttentionBackend,
    StateCaptures,
    StepMetadata,
)
from megatron_infer.kernels.native.native_latent import NativeLatentAttention
from megatron_infer.kernels.native.native_layers import LayerProgram, NativeLayers
from megatron_infer.kernels.ssm import RecurrentSpec, ScanBackend, SsmWeights
from megatron_infer.kernels.step_gather import StepTables
from megatron_infer.memory.device import Device
from megatron_infer.runner.plan_writer import PlanWriter
from megatron_infer.runner.row_tensors import RowTensors
from megatron_infer.runner.step_buffer import StepBuffer, StepSize, StepViews
from megatron_infer.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from megatron_infer.config.resolved_sizes import ResolvedSizes
    from megatron_infer.kernels.lora import LoRABackend
    from megatron_infer.kernels.select import ChosenKernels
    from megatron_infer.memory.layerwise_restore import LayerwiseRestore
    from megatron_infer.memory.store import StepCache
    from megatron_infer.memory.store_layout import StateTensors

EMPTY_PLAN = StepPlan(step=-1)
"""Padded to a shape: a step of padding alone."""


@dataclass(slots=True)
class Batch:
    """One step on the device: what the model's layers receive as `inference_context` (kernels.base.StepInputs)."""

    meta: StepMetadata
    views: StepViews
    token_ids_T: Tensor
    """int64; set by `BatchBuilder.derive`, as are meta's positions, cache positions and cos/sin."""
    sample_rows: np.ndarray
    """int32 [num_sampled] request row of each sample."""
    sample_positions: np.ndarray
    """int64 [num_sampled] position of each token to be drawn."""
    ops: Ops
    attention: AttentionBackend
    kv_cache: Tensor
    scan: ScanBackend | None
    states: StateTensors | None
    """None for a model that keeps no recurrent states."""
    layers: NativeLayers | None
    max_sequence_length: int
    first_dummy_pos: int
    """Where the dummy block, the last one, begins among the values of `meta.kv_pos_T`."""
    restore: LayerwiseRestore | None = None
    """The cache is being restored: each layer waits, on the device, for its own part. None: all of it is there."""
    routing_TLK: Tensor | None = None
    tokens_of_ranks: Sequence[int] | None = None
    index_choices: list[Tensor] | None = None
    """Gets the keys that each layer's indexer chooses, int32 [T, top-k]; None: no request asks for them."""
    lora: LoRABackend | None = None
    expanded: NativeLatentAttention | None = None
    """`attention`, where it may compute tokens in another way; None: it computes all alike."""
    is_padded: bool = False
    only_sampled: bool = False
    """Only the final hidden states of sampled tokens are read: kernels may leave out the others."""
    is_narrow: bool = False
    """They did: a row of the final hidden states for each sample, in the place of one for each token."""

    use_flashinfer_fused_rope = False
    materialize_only_last_token_logits = True
    num_speculative_tokens = 0

    @property
    def padding_T1(self) -> Tensor | None:
        """Tokens that pad the step: they are written to the dummy block, which lies behind all others."""
        return (self.meta.kv_pos_T >= self.first_dummy_pos).unsqueeze(1) if self.is_padded else None

    @property
    def sample_token_S(self) -> Tensor:
        """int64 index into the step's tokens of each sample's last context token. A padded step has as many samples as
        its shape has sequences; those behind the first num_sampled are 0 here."""
        return self.views.mirror["sample_token"]

    @property
    def sample_row_S(self) -> Tensor:
        """int32 request row of each sample; behind the first num_sampled the dummy row."""
        return self.views.mirror["sample_row"]

    @property
    def sample_position_S(self) -> Tensor:
        """int32 position of each token to be drawn; behind the first num_sampled 0."""
        return self.views.mirror["sample_position"]

    @property
    def num_sampled(self) -> int:
        """Samples that are not padding."""
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
        if self.restore is not None:
            self.restore.wait_for_layer(("blocks", layer))
        return self.attention.run(q_TKGH, k_TKH, v_TKH, self.kv_cache, layer=layer, spec=spec)

    @property
    def absorbed_S(self) -> Tensor | None:
        return None if self.expanded is None else self.expanded.absorbed_S

    def attend_expanded(self, layer: int, q_TNH: Tensor, weight_XL: Tensor, spec: AttendSpec, out_TX: Tensor) -> None:
        assert self.expanded is not None
        self.expanded.run_expanded(q_TNH, weight_XL, out_TX, self.kv_cache, layer=layer, spec=spec)

    def attend_to_chosen(
        self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, spec: AttendSpec, index: IndexQueries | None
    ) -> Tensor:
        if self.restore is not None:
            self.restore.wait_for_layer(("blocks", layer))
        backend = cast(SparseAttentionBackend, self.attention)
        out_TX = backend.run_sparse(q_TKGH, k_TKH, self.kv_cache, layer=layer, spec=spec, index=index)
        if self.index_choices is not None and index is not None:
            self.index_choices.append(backend.choice_of_step(self.max_sequence_length))
        return out_TX

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
        assert self.scan is not None and self.states is not None, "a recurrent layer in a model adopted without any"
        if self.restore is not None:
            self.restore.wait_for_layer(("states", layer))
        return self.scan.run(xBC_TC, dt_TX, self.states.layer(layer), weights, spec)

    def run_program(
        self, program: LayerProgram, x_TX: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        if self.layers is None or self.restore is not None:
            return None
        narrows = self.only_sampled and program.narrows_at is not None
        narrows = narrows and self.lora is None and self.routing_TLK is None
        kept_S = self.sample_token_S[: self.num_sampled] if narrows and self.num_sampled < self.num_tokens else None
        done = self.layers.run(
            program,
            self.kv_cache,
            x_TX,
            residual_TD,
            has_adapters=self.lora is not None,
            kept_S=kept_S,
            routing_TLK=self.routing_TLK,
        )
        self.is_narrow = done is not None and kept_S is not None
        return done

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


class Rotations:
    """cos and sin of every position in the activation dtype, on the device; graphs read them at fixed addresses."""

    def __init__(self, device: Device, dtype: torch.dtype, max_sequence_length: int) -> None:
        self._device, self._dtype, self._num_positions = device, dtype, max_sequence_length
        self.cos_PR: Tensor | None = None
        self.sin_PR: Tensor | None = None

    def set(self, rotary: RotaryTable | None) -> None:
        """Use these angles from now on; they are written to the memory of the ones before."""
        cos_PR, sin_PR = self._cast(rotary)
        for name, new in (("cos_PR", cos_PR), ("sin_PR", sin_PR)):
            have: Tensor | None = getattr(self, name)
            # a tensor made in a caller's inference mode could not be written to outside of one
            with torch.inference_mode(False), torch.no_grad():
                if have is not None and new is not None and have.shape == new.shape:
                    have.copy_(new)
                else:
                    setattr(self, name, new.clone() if new is not None and new.is_inference() else new)

    def differs(self, rotary: RotaryTable | None) -> str | None:
        """Which table in use differs from this one, "cos" or "sin"; None: neither."""
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
    """Turns plans into batches; owns the block table and the token pool on the device.

    The store's tensors are looked up at each step: a suspend may have moved them since. A request's row is also its
    state slot, so the row of each of the step's sequences is all that a scan needs to find its state. While a resume's
    copies run, a step that is not padded waits for the cache layer by layer; a padded one waits for all of it first,
    because a graph would repeat the waits.
    """

    def __init__(
        self,
        device: Device,
        sizes: ResolvedSizes,
        store: StepCache,
        kernels: ChosenKernels,
        *,
        rotary: RotaryTable | None,
        dtype: torch.dtype,
        max_drafts: int = 0,
        rows: RowTensors | None = None,
    ) -> None:
        """dtype: of activations. max_drafts: of a row in a step. rows: shared with another builder; None: its own.
        Steps may be padded to `sizes.graph_shapes`."""
        max_requests, max_tokens, shapes = sizes.max_requests, sizes.max_tokens, sizes.graph_shapes
        self._buffer = StepBuffer(
            device,
            max_sequences=max(max_requests * (1 + max_drafts), *(shape.num_rows for shape in shapes), 1),
            max_tokens=max(max_tokens, *(shape.num_tokens for shape in shapes), 1),
            max_writes=max(256, 2 * max_requests + max_tokens // sizes.block_size + sizes.max_blocks_per_row),
        )
        self.rows = RowTensors(device, sizes, dummy_block=store.layout.dummy_block) if rows is None else rows
        self.writer = PlanWriter(self._buffer, dummy_row=self.rows.dummy_row)
        self.device, self.store, self._kernels = device, store, kernels
        self._block_size, self._first_dummy_pos = sizes.block_size, store.layout.dummy_block * sizes.block_size
        self.rotations = Rotations(device, dtype, sizes.max_sequence_length)
        self.rotations.set(rotary)
        self._static: dict[GraphShape, StepMetadata] = {}

    @property
    def ops(self) -> Ops:
        """What the layers compute with."""
        return self._kernels.ops

    @property
    def token_pool(self) -> Tensor:
        """int32 [rows + 1, positions] on the device: the ids of each row's tokens."""
        return self.rows.token_pool

    def build(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        *,
        shape: GraphShape | None = None,
        rows_are_written: bool = False,
    ) -> Batch:
        """Upload a step; the batch is valid until the next build.

        With a shape the step is padded to it, and the caller calls `derive`. rows_are_written: a builder that shares
        the rows has put the plan's tokens there.
        """
        try:
            written = self.writer.write(plan, shape)
            num_writes = self.rows.put_writes(table_writes, self._buffer)
            if written.advances and not num_writes:
                self._buffer.advance_mirror(len(written.sample_rows))
            else:
                self._buffer.upload(written.views.size, writes=num_writes > 0)
            self.rows.apply_writes(num_writes, self._buffer)
            if not rows_are_written:
                self.rows.admit(plan)
        except BaseException:
            self.writer.forget()
            raise
        restore = self.store.pending_restore()
        captures = _captures(plan, first_prefill=written.views.size.num_decode)
        if shape is not None:
            batch = self._batch(replace(self._static_meta(shape), captures=captures), written.views)
        else:
            batch = self._batch(self._meta(written.views, captures=captures), written.views, restore)
        batch.sample_rows, batch.sample_positions = written.sample_rows, written.sample_positions
        if shape is None:
            has_adapters = self._kernels.lora is not None and self.rows.has_adapters(written.views.host["table_row"])
            batch.lora = self._kernels.lora if has_adapters else None
            self.derive(batch)
        return batch

    def static_view(self, shape: GraphShape) -> Batch:
        """The tensors that every step padded to `shape` has; `derive` gathers the rest from their content at that time.

        Valid until the cache is released or moved.
        """
        size = StepSize.of(shape)
        batch = self._batch(replace(self._static_meta(shape)), self._buffer.views(size))
        batch.is_padded = True
        batch.lora = self._kernels.lora if shape.has_adapters else None
        return batch

    def derive(self, batch: Batch) -> None:
        """Gather what the layers need of a step from its mirror, and let the backends plan. Device work alone: a graph
        may capture it where the backends say so."""
        rows, meta, mirror, kernels = self.rows, batch.meta, batch.views.mirror, self._kernels
        batch.token_ids_T, meta.positions_T, meta.kv_pos_T, meta.cos_TR, meta.sin_TR = kernels.gather(
            mirror["token_position"], mirror["token_row"], self._tables()
        )
        if batch.lora is not None:
            batch.lora.plan(rows.adapter_slot_R.index_select(0, mirror["token_row"]))
        kernels.attention.plan(meta)
        if kernels.scan is not None:
            kernels.scan.plan(meta)

    def plan_gathered(self, batch: Batch, positions: np.ndarray, attention: AttentionBackend) -> None:
        """The batch attends by `attention`, which passes on keys and values of other ranks' tokens next to its own.

        positions: int32, of all these tokens, its own first; all are of one row. The layers run one by one.
        """
        kernels, position_A = self._kernels, self.device.to_device(positions)
        row_A = batch.views.mirror["token_row"][:1].repeat(len(positions))
        _, positions_A, kv_pos_A, cos_AR, sin_AR = kernels.gather(position_A, row_A, self._tables())
        found = {"positions_T": positions_A, "kv_pos_T": kv_pos_A, "cos_TR": cos_AR, "sin_TR": sin_AR}
        meta = replace(batch.meta, num_tokens=len(positions), **found)
        kernels.attention.plan(meta)
        batch.attention, batch.layers, batch.expanded = attention, None, None

    def store_sampled(self, batch: Batch, tokens_S: Tensor) -> None:
        """Write drawn tokens into the token pool, where the next step's gather reads them; before the next build.

        tokens_S: num_sampled of them, or as many as the batch has samples.
        """
        count = len(tokens_S)
        self.rows.store(batch.sample_row_S[:count], batch.sample_position_S[:count], tokens_S)

    def store_received(self, batch: Batch, tokens: np.ndarray) -> None:
        """`store_sampled` of int64 tokens on the host; later steps may have been built since."""
        arrays = (batch.sample_rows, batch.sample_positions, tokens)
        self.rows.store(*(self.device.to_device(array) for array in arrays))

    def _tables(self) -> StepTables:
        rows, rotations = self.rows, self.rotations
        return StepTables(rows.block_table, rows.token_pool, self._block_size, rotations.cos_PR, rotations.sin_PR)

    def _static_meta(self, shape: GraphShape) -> StepMetadata:
        meta = self._static.get(shape)
        if meta is None:
            widest = shape.num_tokens - shape.num_decode if shape.num_prefill else 1
            longest = self.rows.max_blocks * self._block_size
            views = self._buffer.views(StepSize.of(shape))
            meta = self._static[shape] = self._meta(views, max_q_len=widest, max_kv_len=longest)
        return meta

    def _meta(self, views: StepViews, **fields: Any) -> StepMetadata:
        """Without the tensors that `derive` sets."""
        host, mirror, size = views.host, views.mirror, views.size
        return StepMetadata(
            num_tokens=size.num_tokens,
            num_rows=size.num_sequences,
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

    def _batch(self, meta: StepMetadata, views: StepViews, restore: LayerwiseRestore | None = None) -> Batch:
        """Without the tensors that `derive` sets, and without samples."""
        kernels = self._kernels
        cache = self.store if restore is None else restore
        return Batch(
            meta=meta,
            views=views,
            token_ids_T=None,  # type: ignore[arg-type]
            sample_rows=_NO_ROWS,
            sample_positions=_NO_POSITIONS,
            ops=kernels.ops,
            attention=kernels.attention,
            kv_cache=cache.kv_cache,
            scan=kernels.scan,
            states=cache.states,
            layers=kernels.layers,
            expanded=kernels.expanded,
            restore=restore,
            max_sequence_length=self.rows.max_sequence_length,
            first_dummy_pos=self._first_dummy_pos,
        )


def _captures(plan: StepPlan, *, first_prefill: int) -> StateCaptures:
    """Recurrent states to keep within the plan's chunks, the first of which is the step's sequence `first_prefill`."""
    kept = [
        (place, position - chunk.start, slot)
        for place, chunk in enumerate(plan.prefill, start=first_prefill)
        for position, slot in chunk.captures
    ]
    if not kept:
        return _NO_CAPTURES
    places, num_tokens, state_slot = np.array(kept, dtype=np.int32).T.copy()
    return StateCaptures(row=places, num_tokens=num_tokens, state_slot=state_slot)


_NO_CAPTURES = StateCaptures()
_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_POSITIONS = np.empty(0, dtype=np.int64)
