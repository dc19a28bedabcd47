"""Interfaces of a pipeline: a model that computes logits, its inputs and outputs, its cache, and what generates text.

    contexts --prepare_initial_token_inputs--> ModelInputs --execute--> ModelOutputs --draw--> next tokens
                                                    ^                                              |
                                                    +-------------prepare_next_token_inputs--------+

Legend: T tokens of a step, R sequences of it, N query heads, K kv heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_infer.config.capacity import GIB
from megatron_infer.config.model_shape import KV_DTYPE_BYTES, kv_block_bytes
from megatron_infer.errors import CapacityError, ConfigError, check_known
from megatron_infer.kernels.symmetric_allreduce import MAX_BYTES
from megatron_infer.runner.sampling.logprobs import score

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.pipelines.inference_session import InferenceSession
    from megatron_infer.pipelines.lora_manager import LoRAManager
    from megatron_infer.pipelines.model_config import KVCacheConfig
    from megatron_infer.pipelines.paged_manager import PagedKVCacheManager
    from megatron_infer.pipelines.resolved import Resolved
    from megatron_infer.pipelines.text_generation import (
        LogProbabilities,
        RequestID,
        TextGenerationInputs,
        TextGenerationOutput,
        TextTokenizer,
    )

ContextT = TypeVar("ContextT")
RequestT = TypeVar("RequestT")


class ReturnLogits(str, Enum):
    """The positions that `PipelineModel.execute` returns logits of."""

    LAST_TOKEN = "last_token"
    """The last token of each sequence."""
    VARIABLE = "variable"
    """The last `return_n_logits` tokens of each sequence."""
    ALL = "all"
    """Every token of the step."""


class KVCacheInputs(Protocol):
    """The cache as a step of a model sees it."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]: the position of each token of the step in its sequence."""
        ...

    def attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Append keys and values of attention layer number `layer` to the cache, attend causally -> [T, N * H]."""
        ...


class ModelInputs:
    """Inputs of one `PipelineModel.execute`: subclasses add tensors as attributes; iterating gives these, in order.

    The order is that of the annotations in the class, then that of assignment; an attribute that is no tensor is left
    out.
    """

    kv_cache_inputs: KVCacheInputs | None = None
    lora_ids: Tensor | None = None
    """int32 [R]: the number of each sequence's adapter (`LoRAManager.id_of`), -1: none. None: the model takes none."""
    lora_ranks: Tensor | None = None
    """int32 [R]: ranks of these, 0: none."""

    def __iter__(self) -> Iterator[Tensor]:
        own = [name for kind in reversed(type(self).__mro__) for name in inspect.get_annotations(kind)]
        base = list(ModelInputs.__annotations__)
        names = [*(name for name in [*own, *vars(self)] if name not in base), *base]
        values = (getattr(self, name, None) for name in dict.fromkeys(names))
        return iter([value for value in values if isinstance(value, Tensor)])

    def update(self, **values: Any) -> None:
        """Set attributes that exist; a value of None changes nothing. Raises ConfigError for an unknown name."""
        known = [name for name in dir(self) if not name.startswith("_") and name != "update"]
        check_known("input", values, known, where=f"{type(self).__name__}: ")
        for name, value in values.items():
            if value is not None:
                setattr(self, name, value)


@dataclass(frozen=True)
class ModelOutputs:
    """What `PipelineModel.execute` computed."""

    logits: Tensor
    """[rows, V]: one row for each position that `ReturnLogits` names, in the order of the step's tokens."""
    next_token_logits: Tensor | None = None
    """[R, V]: of the last token of each sequence; None: `logits` has these and no others."""
    logit_offsets: Tensor | None = None
    """int64 [R + 1]: where the rows of each sequence begin in `logits`; None: each has one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheParams:
    """What a model keeps in the cache: the same in each of its attention layers."""

    dtype: torch.dtype
    num_layers: int
    """Attention layers."""
    n_kv_heads: int
    head_dim: int
    n_heads: int | None = None
    """Query heads; None: as many as kv heads."""
    page_size: int | None = None
    """Tokens of a block; None: as the engine is configured."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """Positions that a query sees, itself included; None: all before it."""
    planes: int = 2
    """Vectors of a token, layer and kv head: a key and a value, or 1, a latent."""

    def page_bytes(self, default_page_size: int) -> int:
        """Bytes of the keys and values of a page."""
        return kv_block_bytes(
            num_layers=self.num_layers,
            block_size=self.page_size or default_page_size,
            num_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype.itemsize,
            planes=self.planes,
        )


class KVCacheMixin(Protocol):
    """A model that keeps keys and values."""

    @classmethod
    def estimate_kv_cache_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        devices: Sequence[torch.device],
        huggingface_config: Any,
        kv_cache_config: KVCacheConfig,
        cache_dtype: torch.dtype,
    ) -> int:
        """Bytes of the tokens and states that the configuration's cache holds, with keys and values in `cache_dtype`;
        at most those available."""
        resolved = pipeline_config.resolved
        sizes, stored = resolved.sizes, _element_bytes(resolved)
        kv, states = int(resolved.engine.buffer_size_gb * GIB), 0
        if sizes is not None:
            kv, states = sizes.kv_bytes, sizes.state_bytes
        return min(kv * cache_dtype.itemsize // stored + states, available_cache_memory)

    @classmethod
    @abstractmethod
    def get_kv_params(
        cls, huggingface_config: Any, n_devices: int, kv_cache_config: KVCacheConfig, cache_dtype: torch.dtype
    ) -> KVCacheParams: ...

    @classmethod
    @abstractmethod
    def get_num_layers(cls, huggingface_config: Any) -> int:
        """Layers that keep keys and values."""
        ...

    def load_kv_manager(self, session: InferenceSession, available_cache_memory: int | None) -> PagedKVCacheManager:
        """The manager of this model's cache, whose memory the engine took when it was made, by its configuration.

        Raises CapacityError if that is more than `available_cache_memory`, ConfigError if no engine runs the model.
        """
        manager: PagedKVCacheManager | None = getattr(self, "kv_manager", None)
        if manager is None:
            raise ConfigError("no engine runs this model yet; make a pipeline of it, which loads the cache")
        taken = sum(one.nbytes for one in manager.device_tensors)
        if available_cache_memory is not None and taken > available_cache_memory:
            raise CapacityError(
                f"the cache has taken {taken:,} bytes, {available_cache_memory:,} are available "
                f"(available_cache_memory); make the pipeline with a smaller buffer_size_gb"
            )
        return manager


def _element_bytes(resolved: Resolved) -> int:
    """Bytes of one element of the keys and values of a configuration's engine."""
    shape, dtype = resolved.shape, resolved.llm["dtype"]
    return KV_DTYPE_BYTES[dtype if shape is None else resolved.engine.kv_dtype_of(shape)]


class PipelineModel(ABC, Generic[ContextT]):
    """A model with setup, preparation of inputs and execution; by a subclass of its own, without megatron-core.

    An engine runs a subclass through `pipelines.foreign_runner`; `McorePipelineModel` is the one of megatron-core's
    models.
    """

    kv_manager: PagedKVCacheManager | None = None
    """Manages the cache of the engine that runs it; None: the model keeps no keys and values, or no engine runs it."""
    lora_manager: LoRAManager | None = None
    """Manages the engine's adapters; None: it has none."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: Any,
        encoding: Any,
        devices: Sequence[torch.device],
        kv_cache_config: KVCacheConfig,
        weights: Any,
        adapter: Any = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    ) -> None:
        """huggingface_config: the content of config.json. weights: tensors by name. adapter: of their format, from
        weight_adapters; None: there is none."""
        self.pipeline_config, self.session, self.huggingface_config = pipeline_config, session, huggingface_config
        self.encoding, self.devices, self.kv_cache_config = encoding, list(devices), kv_cache_config
        self.weights, self.adapter, self.return_logits = weights, adapter, return_logits
        self.max_seq_len = self.calculate_max_seq_len(pipeline_config, huggingface_config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, as the configuration's encoding says."""
        named = "float32" if self.encoding is None else str(getattr(self.encoding, "value", self.encoding))
        return torch.bfloat16 if named == "bfloat16" else torch.float32

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Memory that ranks share for sums; empty where there is none, and on one device."""
        return []

    @classmethod
    @abstractmethod
    def calculate_max_seq_len(cls, pipeline_config: PipelineConfig, huggingface_config: Any) -> int:
        """Tokens of the longest sequence. Raises ValueError where the configuration asks for more."""

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """Bytes of the weights, by the configuration's estimate; 0: it has none."""
        estimate = pipeline_config.resolved.estimate
        return 0 if estimate is None else estimate.weights

    @classmethod
    def estimate_activation_memory(cls, pipeline_config: PipelineConfig, huggingface_config: Any) -> int:
        """Bytes that a step needs beside weights and cache, by the configuration's estimate; 0: it has none."""
        estimate = pipeline_config.resolved.estimate
        return 0 if estimate is None else estimate.activations

    @classmethod
    def infer_optimal_batch_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        huggingface_config: Any,
        devices: Sequence[torch.device],
        kv_cache_config: KVCacheConfig,
        cache_dtype: torch.dtype,
    ) -> int:
        """Requests at once, at most those of the configuration: each has one page of the available memory, in
        `cache_dtype`, and its recurrent state, and one page is a dummy. 1 for a model without a cache."""
        get_kv_params = getattr(cls, "get_kv_params", None)
        if get_kv_params is None:
            return 1
        resolved = pipeline_config.resolved
        params: KVCacheParams = get_kv_params(huggingface_config, max(1, len(devices)), kv_cache_config, cache_dtype)
        most, each = resolved.engine.max_requests, params.page_bytes(resolved.engine.block_size_tokens)
        if (sizes := resolved.sizes) is not None:
            most, each = sizes.max_requests, each + sizes.draft_block_bytes + sizes.state_slot_bytes
        fit = available_cache_memory // each - 1
        return max(1, fit if most is None else min(most, fit))

    @abstractmethod
    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[ContextT],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        """Inputs of a step that computes each context's `next_tokens`, in order.

        kv_cache_inputs: the step's part of the cache; None: the model has no cache, or claims what it needs.
        """

    @abstractmethod
    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        """Inputs of the step after that of `prev_model_inputs`, with one token for each of the same sequences.

        next_tokens: int64 [R], on the device. Under an engine `prev_model_inputs` already has the step's cache inputs.
        """

    @abstractmethod
    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Compute the step's logits."""

    def compute_log_probabilities(
        self,
        session: InferenceSession,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: Sequence[int],
        batch_echo: Sequence[bool],
    ) -> list[LogProbabilities | None]:
        """Log probabilities under softmax of the model's logits, for each sequence; None where its top n is 0.

        next_tokens: [R], drawn from the last position. With echo the input tokens but the first come before it, which
        needs ReturnLogits.ALL, and `tokens` [T] and `input_row_offsets` [R + 1] of the inputs. The token itself is
        always among the top ones. Raises ConfigError for an echo of inputs or logits that lack these.
        """
        last = model_outputs.logits if model_outputs.next_token_logits is None else model_outputs.next_token_logits
        found: list[LogProbabilities | None] = []
        for row, (top, echo) in enumerate(zip(batch_top_n, batch_echo, strict=True)):
            if top == 0:
                found.append(None)
            elif echo:
                logits, targets = _echoed(model_inputs, model_outputs, row)
                targets = torch.cat([targets.to(next_tokens), next_tokens[row : row + 1]])
                found.append(_scored(logits, targets, top))
            else:
                found.append(_scored(last[row : row + 1], next_tokens[row : row + 1], top))
        return found


def _echoed(inputs: ModelInputs, outputs: ModelOutputs, row: int) -> tuple[Tensor, Tensor]:
    """(logits of every position of a sequence, its input tokens but the first)."""
    tokens, offsets = getattr(inputs, "tokens", None), getattr(inputs, "input_row_offsets", None)
    if tokens is None or offsets is None:
        raise ConfigError(
            f"log probabilities of input tokens need the attributes tokens and input_row_offsets of the inputs, which "
            f"{type(inputs).__name__} lacks; add them, or override compute_log_probabilities"
        )
    begin, end, num_tokens = (int(offsets[at]) for at in (row, row + 1, -1))
    if len(outputs.logits) != num_tokens:
        raise ConfigError(
            f"log probabilities of input tokens need logits of every position; there are {len(outputs.logits):,} for "
            f"{num_tokens:,} tokens: make the model with return_logits=ReturnLogits.ALL (enable_echo=True)"
        )
    return outputs.logits[begin:end], tokens[begin + 1 : end]


def _scored(logits_AV: Tensor, token_A: Tensor, top: int) -> LogProbabilities:
    from megatron_infer.pipelines.text_generation import LogProbabilities

    own, _, ids, values = score(logits_AV, token_A, min(top, logits_AV.shape[1]))
    rows = zip(token_A.tolist(), own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return LogProbabilities(
        token_log_probabilities=own.tolist(),
        top_log_probabilities=[
            {token: logprob} | dict(zip(best, scores, strict=True)) for token, logprob, best, scores in rows
        ],
    )


class AlwaysSignalBuffersMixin:
    """For models whose collectives run on one device too: a buffer for each device, shared memory or not."""

    devices: list[torch.device]
    _own_buffers: list[Tensor] | None = None

    @property
    def signal_buffers(self) -> list[Tensor]:
        """One for each device, made at the first use: the memory that ranks share where there is some."""
        shared: list[Tensor] = getattr(super(), "signal_buffers", [])
        if shared:
            return shared
        if self._own_buffers is None:
            self._own_buffers = [torch.zeros(MAX_BYTES, dtype=torch.uint8, device=device) for device in self.devices]
        return self._own_buffers


class GenerateMixin(Protocol[ContextT, RequestT]):
    """What a pipeline has for generating text: `generate` and `generate_async` follow from the other members."""

    @property
    def kv_managers(self) -> list[PagedKVCacheManager]: ...

    @property
    def pipeline_config(self) -> PipelineConfig | None: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    def execute(self, inputs: TextGenerationInputs[ContextT]) -> Mapping[RequestID, TextGenerationOutput]: ...

    def release(self, request_id: RequestID) -> None:
        """End a request and take its memory back."""
        ...

    def execute_own(self, contexts: Sequence[ContextT]) -> Mapping[RequestID, TextGenerationOutput]:
        """`execute`, for one of several callers that share the pipeline -> outputs of `contexts` only.

        Outputs of other contexts are dropped here: a pipeline that overlaps batches of several callers overrides it.
        """
        from megatron_infer.pipelines.text_generation import TextGenerationInputs

        news = self.execute(TextGenerationInputs.of(contexts))
        ids = [context.request_id for context in contexts]  # type: ignore[attr-defined]
        return {one: news[one] for one in ids if one in news}

    def generate(self, prompts: RequestT | Sequence[RequestT]) -> list[TextGenerationOutput]:
        """Run prompts to the end -> their outputs, in order. Interrupted, it leaves no request behind."""
        from megatron_infer.pipelines.text_generation import GenerationLoop

        loop = GenerationLoop(self, prompts)
        with loop:
            while loop.is_running:
                loop.step()
        return loop.outputs()

    async def generate_async(self, prompts: RequestT | Sequence[RequestT]) -> AsyncIterator[list[TextGenerationOutput]]:
        """Outputs of each step as they come, those that end marked. Left or cancelled half-way, all requests end."""
        from megatron_infer.pipelines.text_generation import GenerationLoop

        loop = GenerationLoop(self, prompts)
        with loop:
            while loop.is_running:
                if news := loop.step():
                    yield news
                await asyncio.sleep(0)  # so that it can be cancelled


def get_paged_manager(pipeline: Any) -> PagedKVCacheManager | None:
    """The manager of a pipeline's paged cache, the first of several; None for a pipeline or model without one."""
    held = [getattr(getattr(pipeline, "pipeline_model", pipeline), "kv_manager", None)]
    return next((one for one in [*held, *getattr(pipeline, "kv_managers", [])] if one is not None), None)


def upper_bounded_default(upper_bound: int, default: int | None) -> int:
    """`default`, or `upper_bound` where it is None. Raises ValueError if it is larger than the bound."""
    if default is None:
        return upper_bound
    if default > upper_bound:
        raise ValueError(f"{default:,} is more than the upper bound, {upper_bound:,}; lower it or leave it None")
    return default
