"""`McorePipelineModel`: a megatron-core model, adopted in place, behind the interface of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, RequestError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.pipelines.inference_session import InferenceSession
from megatron_infer.pipelines.interfaces import (
    KVCacheInputs,
    KVCacheMixin,
    KVCacheParams,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    ReturnLogits,
    upper_bounded_default,
)
from megatron_infer.pipelines.lora_manager import LoRAManager
from megatron_infer.pipelines.paged_manager import PagedCacheInputs, PagedKVCacheManager
from megatron_infer.pipelines.text_generation import TextContext

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig


class McoreInputs(ModelInputs):
    """A step of a megatron-core model."""

    tokens: Tensor
    """int64 [T]."""
    input_row_offsets: Tensor
    """int64 [R + 1]: where each sequence begins among the tokens."""

    def __init__(
        self,
        tokens: Tensor,
        input_row_offsets: Tensor,
        kv_cache_inputs: PagedCacheInputs,
        return_n_logits: int = 1,
        lora: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> None:
        """lora: lora_ids and lora_ranks; None: of an engine without adapters."""
        self.tokens, self.input_row_offsets = tokens, input_row_offsets
        self.lora_ids, self.lora_ranks = lora or (None, None)
        self.cache, self.return_n_logits = kv_cache_inputs, return_n_logits
        self.kv_cache_inputs = kv_cache_inputs


class McorePipelineModel(PipelineModel[TextContext], KVCacheMixin):
    """A megatron-core model with its engine: the pipeline drives the engine, a loop by hand calls `execute`.

    By hand, one rank or tensor-parallel ranks that all call it alike; nothing of the engine may be in flight.
    """

    kv_manager: PagedKVCacheManager

    def __init__(
        self,
        pipeline_config: PipelineConfig | None,
        session: InferenceSession,
        huggingface_config: ModelDescription | None,
        encoding: Any,
        devices: Sequence[torch.device],
        kv_cache_config: Any,
        weights: Any,
        adapter: Any = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        *,
        config: InferenceConfig | None = None,
        engine: DynamicInferenceEngine | None = None,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """huggingface_config: the model's description. weights: a `ModelSource`. config: of the engine; None: as
        resolved. engine: of a live model, instead of a new one. eos_ids: besides the model's own."""
        if adapter is not None:
            raise ConfigError("weight_adapters: megatron-core's models read their formats' names; leave them empty")
        if engine is None:
            if config is None:
                assert pipeline_config is not None, "neither an engine nor a configuration"
                config = pipeline_config.resolved.engine
            device, description = devices[0], weights.config()
            legacy = pipeline_config is not None and pipeline_config.resolved.llm["use_legacy_module"]
            dtype = torch.bfloat16 if str(getattr(encoding, "value", encoding)) == "bfloat16" else torch.float32
            engine = DynamicInferenceEngine(
                build_model(
                    weights,
                    dtype=dtype,
                    device=str(device),
                    use_legacy_module=legacy,
                    max_sequence_length=config.max_sequence_length,
                ),
                config,
                tokenizer=tokenizer,
                eos_ids=tuple(dict.fromkeys((*description.eos_ids, *eos_ids))),
                device=str(device),
                model_name=weights.name,
                owns_weights=True,
            )
        self.engine = engine
        common: Any = (pipeline_config, session, huggingface_config, encoding, devices, kv_cache_config, weights)
        super().__init__(*common, adapter, return_logits)
        self.max_seq_len = engine.sizes.max_sequence_length
        self.kv_manager = PagedKVCacheManager(engine)
        if engine.config.lora is not None:
            self.lora_manager = LoRAManager(engine)

    @classmethod
    def wrap(
        cls, engine: DynamicInferenceEngine, *, return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN
    ) -> McorePipelineModel:
        """The model of an engine that exists, of a trainer's for instance."""
        devices = [engine.device.torch]
        encoding = engine.shape.dtype
        session = InferenceSession(devices=devices, num_threads=torch.get_num_threads())
        return cls(None, session, None, encoding, devices, None, None, None, return_logits, engine=engine)

    @property
    def signal_buffers(self) -> list[Tensor]:
        """The symmetric memory through which ranks sum small tensors; empty where there is none."""
        return [buffer for reducer in self.engine.replay.model.reducers() for buffer in reducer.shared_buffers]

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig | None, huggingface_config: ModelDescription | None
    ) -> int:
        """See `PipelineModel`. 0 for the model of an engine that exists, which knows its own limit."""
        if pipeline_config is None or huggingface_config is None:
            return 0
        return upper_bounded_default(huggingface_config.max_sequence_length, pipeline_config.max_length)

    @classmethod
    def get_kv_params(
        cls, huggingface_config: ModelDescription, n_devices: int, kv_cache_config: Any, cache_dtype: torch.dtype
    ) -> KVCacheParams:
        """What one of n_devices ranks keeps, with the groups by which the model is padded. Raises ConfigError."""
        shape = shape_of(huggingface_config, dtype="float32", tensor_parallel_size=n_devices)
        return KVCacheParams(
            dtype=cache_dtype,
            num_layers=cls.get_num_layers(huggingface_config),
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            n_heads=shape.num_query_heads,
            page_size=getattr(kv_cache_config, "kv_cache_page_size", None),
            planes=shape.kv_planes,
        )

    @classmethod
    def get_num_layers(cls, huggingface_config: ModelDescription) -> int:
        """Attention layers."""
        layers: int = huggingface_config.transformer["num_layers"]
        return layers if huggingface_config.hybrid is None else sum(map(huggingface_config.hybrid.pattern.count, "*P"))

    # ------------------------------------------------------------------ by hand

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[TextContext],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> McoreInputs:
        """See `PipelineModel`. kv_cache_inputs: of `kv_manager.runtime_inputs`; None: contexts are claimed and
        allocated here. Weights that changed are noticed here. Raises InsufficientBlocksError."""
        self.engine.lifecycle.require("prepare_initial_token_inputs()", EngineState.RUNNING)
        self.kv_manager.require_idle()
        self.engine.weights.accept_changes()
        if kv_cache_inputs is None:
            for context in context_batch:
                if not self.kv_manager.contains(context.request_id):
                    self.kv_manager.claim(context.request_id)
                self.kv_manager.alloc(context)
            kv_cache_inputs = self.kv_manager.runtime_inputs(context_batch)
        assert isinstance(kv_cache_inputs, PagedCacheInputs)
        device = self.devices[0]
        tokens = torch.cat([context.next_tokens for context in context_batch]).to(device)
        lengths = [0, *(context.active_length for context in context_batch)]
        offsets = torch.tensor(lengths, dtype=torch.int64, device=device).cumsum(0)
        lora = None if self.lora_manager is None else self.lora_manager.inputs_of(context_batch)
        return McoreInputs(tokens, offsets, kv_cache_inputs, return_n_logits, lora)

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> McoreInputs:
        """See `PipelineModel`. Pages are taken where the next token begins one."""
        assert isinstance(prev_model_inputs, McoreInputs)
        tokens = torch.as_tensor(next_tokens, dtype=torch.int64, device=self.devices[0])
        num_sequences = len(prev_model_inputs.input_row_offsets) - 1
        if tokens.shape != (num_sequences,):
            raise RequestError(
                f"next_tokens has the shape {tuple(tokens.shape)}, it must be ({num_sequences},): one for each sequence"
            )
        offsets = torch.arange(len(tokens) + 1, device=tokens.device)
        before, lora = prev_model_inputs, (prev_model_inputs.lora_ids, prev_model_inputs.lora_ranks)
        return McoreInputs(tokens, offsets, before.cache.advanced(), before.return_n_logits, lora)

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """See `PipelineModel`. Logits are those of the vocabulary without its padding, of the weights as they are."""
        assert isinstance(model_inputs, McoreInputs)
        engine, adopted, shape = self.engine, self.engine.replay.model, self.engine.shape
        if shape.is_stage:
            raise NotImplementedError("execute by hand on pipeline stages; use the pipeline's execute, or one stage")
        engine.lifecycle.require("execute()", EngineState.RUNNING)
        self.kv_manager.require_idle()
        if engine.rank_group.any_rank(engine.weights.differ(read_all=False)):  # their content was read for the prompt
            engine.weights.accept(engine.weights.version + 1)
        _choose_adapters(self.lora_manager, model_inputs)
        with engine.replay.inference(engine.loop), torch.inference_mode():
            batch: Any = model_inputs.cache.batch
            batch.token_ids_T = model_inputs.tokens
            hidden_TD = adopted.hidden(batch)
            offsets = model_inputs.input_row_offsets
            rows, row_offsets = _returned(self.return_logits, offsets, model_inputs.return_n_logits)
            last = offsets[1:] - 1

            def logits_of(at: Tensor | None) -> Tensor:
                hidden = hidden_TD if at is None else hidden_TD.index_select(0, at)
                return adopted.whole_logits(adopted.logits(hidden, batch.ops))[:, : shape.vocab_size]

            if row_offsets is None:
                logits = logits_of(last)
                return ModelOutputs(logits=logits, next_token_logits=logits)
            logits = logits_of(rows)
            return ModelOutputs(
                logits=logits, next_token_logits=logits.index_select(0, row_offsets[1:] - 1), logit_offsets=row_offsets
            )


def _choose_adapters(lora: LoRAManager | None, inputs: McoreInputs) -> None:
    """Compute the step with the adapters that `lora_ids` stand for."""
    if inputs.lora_ids is None:
        return
    if lora is None:
        raise ConfigError("lora_ids are given, and this engine has no adapters; set enable_lora, or leave them None")
    names = lora.names_of(inputs.lora_ids)
    inputs.cache.compute_with(names, lora.slots_of(names))


def _returned(mode: ReturnLogits, offsets: Tensor, return_n_logits: int) -> tuple[Tensor | None, Tensor | None]:
    """(positions whose logits are returned, None: all; their offsets by sequence, None: the last of each)."""
    if mode is ReturnLogits.ALL:
        return None, offsets
    if mode is ReturnLogits.LAST_TOKEN:
        return None, None
    bounds = offsets.tolist()
    kept = [range(max(begin, end - return_n_logits), end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    counts = torch.tensor([0, *map(len, kept)], device=offsets.device).cumsum(0)
    return torch.tensor([at for span in kept for at in span], device=offsets.device), counts
