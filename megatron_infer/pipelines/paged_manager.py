"""The paged cache of an engine as a pipeline sees it: claims, pages and the cache's part of a step.

    claim ── alloc ── runtime_inputs ── (the model's execute) ── step ── release

A loop by hand claims and allocates for each of its contexts. A context that a pipeline's `execute` runs needs neither:
what was allocated for it is handed over to the engine's scheduler, which pages for it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import CapacityError, ConfigError, DuplicateRequest, RequestError, UnknownRequest, WrongState
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.runner.batch import Batch
from megatron_infer.scheduler.context.block_digest import salted
from megatron_infer.scheduler.request import CacheUse, Request
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan

if TYPE_CHECKING:
    from megatron_infer.pipelines.text_generation import RequestID, TextContext
    from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext


class InsufficientBlocksError(CapacityError):
    """The cache has no row or not enough pages for what a caller allocates."""


@dataclass(slots=True)
class PagedCacheInputs:
    """The cache of one step, as `interfaces.KVCacheInputs`; it is built when the model executes, or first asks."""

    manager: PagedKVCacheManager
    plan: StepPlan
    specs: Sequence[AttendSpec]
    """One for each attention layer."""
    _adapter_slots: Sequence[int] = ()
    """The slot of each sequence's adapter, in order; empty: no sequence has an adapter."""
    _batch: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The step on the device; valid until the next one is built."""
        if self._batch is None:
            self._batch = self.manager.build(self.plan, self._adapter_slots)
        return self._batch

    def compute_with(self, adapters: Sequence[str | None], slots: Sequence[int]) -> None:
        """Compute the step with these adapters, one for each sequence, which are in these slots; None and -1: none."""
        requests = self.plan.sampled
        if len(adapters) != len(requests):
            raise ConfigError(
                f"lora_ids has {len(adapters)} ids, the step {len(requests)} sequences; give one for each"
            )
        for request, name in zip(requests, adapters, strict=True):
            if name != request.params.adapter:  # a prompt that names its own adapter must not find these keys
                assert request.lease is not None
                request.lease.publishes = False
        self._adapter_slots, self._batch = slots, None

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return self.batch.positions_T

    def attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """See `interfaces.KVCacheInputs`."""
        return attend(self.batch, self.specs, layer, q_TNH, k_TKH, v_TKH)

    def advanced(self) -> PagedCacheInputs:
        """The inputs of the next step: one token more for each sequence."""
        starts = [chunk.start + chunk.n for chunk in self.plan.prefill]
        starts += [start + 1 for start in self.plan.decode_starts]
        requests = [chunk.request for chunk in self.plan.prefill] or list(self.plan.decode)
        for request, start in zip(requests, starts, strict=True):
            self.manager.grow(request, start + 1)
        return replace(
            self,
            plan=_plan_of([(request, start, 1) for request, start in zip(requests, starts, strict=True)]),
            _batch=None,
        )


def attend(
    batch: Batch, specs: Sequence[AttendSpec], layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
) -> Tensor:
    """Attention of one layer of a step, [T, N * H]: see `interfaces.KVCacheInputs.attend`."""
    spec = specs[layer]
    q_TKGH = q_TNH.view(len(q_TNH), spec.num_kv_heads, spec.group_size, spec.head_dim)
    return batch.attend(layer, q_TKGH, k_TKH, v_TKH, spec)


class PagedKVCacheManager:
    """A view of an engine's context and cache, for loops by hand and for what a pipeline's caller asks of pages."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        self._held: dict[RequestID, Request | None] = {}
        """Claimed by hand; None: nothing is allocated."""

    # ------------------------------------------------------------------ pages

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._context.block_size

    @property
    def total_num_pages(self) -> int:
        return self._context.num_blocks

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, those with cached prefixes included."""
        return self._context.num_free_blocks

    @property
    def num_used_pages(self) -> int:
        return self.total_num_pages - self.num_free_pages

    @property
    def device_tensors(self) -> list[Tensor]:
        """Keys and values [layers, 2, pages + 1, page, heads, head dim], and recurrent states if the model has any."""
        store = self.engine.replay.runner.store
        states = store.states
        return [store.kv_cache, *([] if states is None else [states.conv_SLCW, states.ssm_SLHPN])]

    def num_pages_of(self, request_id: RequestID) -> int:
        """Pages that a sequence holds; 0 for one that is unknown or waits."""
        request = self._request_of(request_id)
        return 0 if request is None or request.lease is None else len(request.lease.blocks)

    def contains(self, request_id: RequestID) -> bool:
        """Whether a request was claimed or runs, and was not released."""
        return request_id in self._held or request_id in self.engine.output_processor

    # ------------------------------------------------------------------ a sequence's life

    def claim(self, request_id: RequestID) -> None:
        """Register a sequence, before `alloc`. Raises DuplicateRequest."""
        if self.contains(request_id):
            raise DuplicateRequest(f"request id {request_id!r} is claimed already; release it first")
        self._held[request_id] = None

    def alloc(self, context: TextContext, num_steps: int = 1) -> None:
        """Room for a context's tokens and for those of `num_steps` steps, all or nothing. Cached prefixes are found.

        Raises InsufficientBlocksError. For a context that `execute` runs it does nothing: the scheduler pages for it.
        """
        if context.request_id in self.engine.output_processor:
            return
        if context.request_id not in self._held:
            raise UnknownRequest(f"no sequence {context.request_id!r}: claim it before alloc")
        held = self._held[context.request_id]
        request = self._admit(context) if held is None else held
        stored = len(context.tokens) + num_steps - 1
        try:
            self.grow(request, stored)
        except BaseException:
            if held is None:
                self._give_back(request)
            raise
        if held is None:
            assert request.lease is not None
            context.start = 0
            context.skip_processing(request.lease.cached)
        self._held[context.request_id] = request

    def runtime_inputs(self, contexts: Sequence[TextContext]) -> PagedCacheInputs:
        """The cache's part of a step that computes each context's `next_tokens`; all are allocated by hand."""
        work = []
        for context in contexts:
            request = self._held.get(context.request_id)
            if request is None and context.request_id in self.engine.output_processor:
                raise DuplicateRequest(
                    f"request id {context.request_id!r} is that of a request of the engine; give the context its own id"
                )
            if request is None:
                raise UnknownRequest(f"sequence {context.request_id!r} has no pages: claim and alloc it first")
            request.tokens[:] = context.tokens
            self.grow(request, len(context.tokens))
            work.append((request, context.start, context.active_length))
        num_tokens, most = sum(n for *_, n in work), self.engine.sizes.max_tokens
        if num_tokens > most:
            raise RequestError(
                f"a step of {num_tokens:,} tokens, the limit is {most:,} (max_tokens, max_batch_input_tokens); compute "
                "fewer contexts in one step, or raise it"
            )
        return PagedCacheInputs(self, _plan_of(work), self.engine.replay.model.specs)

    def step(self, contexts: Sequence[TextContext]) -> None:
        """The contexts' tokens but the last are computed: full pages can be found by later prompts."""
        for context in contexts:
            request = self._held.get(context.request_id)
            if request is None or request.lease is None:
                continue
            if request.history.adapter != self._adapter_of(request):  # other content: these keys are not of it alone
                request.lease.publishes = False
            if request.lease.publishes:
                self._context.publish_computed(request.lease, context.tokens, context.start)

    def release(self, request_id: RequestID) -> None:
        """Take back the pages of a sequence that was claimed by hand; else nothing."""
        request = self._held.pop(request_id, None)
        if request is not None:
            self._give_back(request)

    # ------------------------------------------------------------------ for the models of this package

    def grow(self, request: Request, num_tokens: int) -> None:
        """Room for so many tokens. Raises InsufficientBlocksError with nothing changed."""
        context = self._context
        assert request.lease is not None
        most = min(context.max_stored_tokens, self.engine.sizes.max_sequence_length)
        if num_tokens > most:
            raise InsufficientBlocksError(
                f"sequence {request.id!r} would have {num_tokens:,} tokens, the limit is {most:,}; lower max_tokens"
            )
        if not context.extend(request.lease, num_tokens):
            raise InsufficientBlocksError(
                f"sequence {request.id!r} needs pages for {num_tokens:,} tokens, {context.num_free_blocks} of "
                f"{context.num_blocks} pages of {context.block_size} tokens are free; release others, or give the "
                "cache more memory"
            )

    def build(self, plan: StepPlan, adapter_slots: Sequence[int] = ()) -> Batch:
        """The step on the device. Nothing of the engine may be in flight. adapter_slots: see `PagedCacheInputs`."""
        self.require_idle()
        runner, adapters = self.engine.replay.runner, self._context.adapters
        with torch.inference_mode():
            if adapters is not None:
                for at, name in adapters.take_loads():
                    assert runner.load_adapter is not None, f"adapter {name!r} in an engine without any"
                    runner.load_adapter(at, name)
                for request, slot in zip(plan.sampled, adapter_slots or [-1] * len(plan.sampled), strict=True):
                    assert request.lease is not None
                    request.lease.adapter_slot = slot
                runner.builder.rows.put_adapter_slots(plan.sampled)
            return runner.builder.build(plan, self._context.take_table_writes())

    def require_idle(self) -> None:
        """Raise WrongState while a step of the engine is in flight."""
        if self.engine.loop.num_in_flight:
            raise WrongState(
                "a step of the engine is in flight; read its outputs (execute with empty inputs) first",
                state=self.engine.state.value,
            )

    def _admit(self, context: TextContext) -> Request:
        cache = self._context
        shares = cache.prefix_caching and cache.states is None  # by hand no recurrent state is kept or loaded
        request = Request(
            id=context.request_id,
            tokens=list(context.tokens),
            prompt_len=context.prompt_len,
            params=context.params,
            max_total=self.engine.sizes.max_sequence_length,
            seed=0,
            cache=CacheUse(allowed=shares),
        )
        root, adapter = self.engine.weights.root, context.params.adapter
        if adapter is not None:
            self.engine.input_processor.check_adapter(adapter)
            assert cache.adapters is not None
            root, request.history.adapter = cache.adapters.root(root, adapter), self._adapter_of(request)
        request.lease = cache.admit(request.tokens, root=salted(root, ""), use_cache=shares)
        if request.lease is None:
            raise InsufficientBlocksError(
                f"no row is free for sequence {context.request_id!r}: {cache.num_rows} are held (max_requests); "
                "release others first"
            )
        request.lease.publishes = shares
        return request

    def _adapter_of(self, request: Request) -> tuple[int, str] | None:
        """(version, digest) of the adapter that a sequence names; None: it names none, or it was unloaded."""
        adapters, name = self._context.adapters, request.params.adapter
        return None if adapters is None or name is None else adapters.versions.get(name)

    def _give_back(self, request: Request) -> None:
        if request.lease is not None:
            self._context.release(request.lease)
            request.lease = None

    def _request_of(self, request_id: RequestID) -> Request | None:
        if (held := self._held.get(request_id)) is not None:
            return held
        state = self.engine.output_processor.get(request_id)
        return None if state is None else state.sequences[0].request

    @property
    def _context(self) -> DynamicInferenceContext:
        return self.engine.replay.context


def _plan_of(work: Sequence[tuple[Request, int, int]]) -> StepPlan:
    """A step that computes n tokens of each request from `start`, in this order."""
    requests = [request for request, *_ in work]
    if all(n == 1 for *_, n in work):
        starts = [start for _, start, _ in work]
        return StepPlan(step=-1, decode=requests, decode_starts=starts, num_tokens=len(work), sampled=requests)
    chunks = [PrefillChunk(request=request, start=start, n=n, samples=True) for request, start, n in work]
    return StepPlan(step=-1, prefill=tuple(chunks), num_tokens=sum(n for *_, n in work), sampled=requests)
