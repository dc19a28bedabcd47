"""Runs a `PipelineModel` of one's own under the engine: its scheduler, cache and sampler, the model's `execute`.

    step of the engine ──> contexts (or: one more token each) ──> the model's inputs ──> execute ──> logits ──> sampler

It lacks what the engine's own models have: recurrent states, CUDA graphs, several ranks; these are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.base import AttendSpec, Ops
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.models.loading.sources import open_source, open_tokenizer
from megatron_infer.pipelines.inference_session import InferenceSession
from megatron_infer.pipelines.interfaces import KVCacheParams, ModelInputs, ModelOutputs, PipelineModel, ReturnLogits
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.paged_manager import PagedKVCacheManager, attend
from megatron_infer.runner.batch import Batch
from megatron_infer.text.end_ids import directory_end_ids
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.utils.files import regular

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig

SAFETENSORS = "safetensors"
"""The format whose adapter in weight_adapters renames a model's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """A sequence of a step, as a model of one's own sees it."""

    next_tokens: Tensor
    """int64: what the step computes of it, on the device."""
    start: int
    """The position of the first of them."""

    @property
    def active_length(self) -> int:
        return len(self.next_tokens)


@dataclass(frozen=True, slots=True)
class StepCache:
    """The cache of a step: `interfaces.KVCacheInputs`."""

    batch: Batch
    specs: Sequence[AttendSpec]

    @property
    def positions(self) -> Tensor:
        return self.batch.positions_T

    def attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        return attend(self.batch, self.specs, layer, q_TNH, k_TKH, v_TKH)


class ForeignWeights(torch.nn.Module):
    """The modules of a model of one's own, as the engine watches their weights; `adopt` finds the model through it."""

    def __init__(self, model: PipelineModel[Any], params: KVCacheParams) -> None:
        super().__init__()
        self._foreign = (model, params)  # not an attribute by itself: the model may be a module, whose parts follow
        parts = {"model": model} if isinstance(model, torch.nn.Module) else vars(model)
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                self.add_module(name, part)

    def as_paged(self, name: str) -> ForeignModel:
        """What the engine runs."""
        model, params = self._foreign
        return ForeignModel(model, params, live=self, name=name)


class ForeignModel:
    """`models.adopt.AdoptedModel` for a model of one's own: nothing is adopted, its `execute` computes each step."""

    is_first_stage = is_last_stage = True
    num_chunks = 1
    fp8 = routing = tp_group = heads = None
    chooses_keys = False
    num_adoptions = 1
    ssm_specs: Sequence[Any] = ()
    linears: Mapping[str, Any] = {}

    def __init__(self, model: PipelineModel[Any], params: KVCacheParams, *, live: ForeignWeights, name: str) -> None:
        self.model, self.live, self.name = model, live, name
        self.device = model.devices[0]
        self.shape = _shape_of(model, params, live)
        self.specs = [_spec_of(params)] * params.num_layers
        self.cache_order = ["blocks"] * params.num_layers
        self._inputs: ModelInputs | None = None
        self._rows: np.ndarray = np.empty(0, dtype=np.int32)
        self._kv_lens: np.ndarray = self._rows
        """Rows and lengths of the step that `_inputs` belongs to."""
        self._outputs: ModelOutputs | None = None
        self._offsets_R1: Tensor | None = None

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Parameters of requests that the model cannot serve -> why."""
        reasons = {"pooling": "the model's final hidden states are not known; it runs by a class of its own"}
        if self.model.return_logits is not ReturnLogits.ALL:
            reasons["prompt_logprobs"] = "logits of prompts are not computed; set enable_echo=True"
        return reasons

    # ------------------------------------------------------------------ a step

    def hidden(self, step: Batch, received_TD: Tensor | None = None) -> Tensor:
        """int64 [T, 1]: each token's place in the step, by which `logits` finds its row; the model executes here."""
        assert received_TD is None, "pipeline stages"
        meta, tokens_T = step.meta, step.token_ids_T
        cache = StepCache(step, self.specs)
        rows, kv_lens = meta.table_row[: meta.num_rows].copy(), meta.kv_len[: meta.num_rows].copy()
        before, self._inputs = self._inputs, None
        advances = meta.num_decode == meta.num_rows and np.array_equal(rows, self._rows)
        if before is not None and advances and np.array_equal(kv_lens, self._kv_lens + 1):
            before.kv_cache_inputs = cache
            inputs = self.model.prepare_next_token_inputs(tokens_T, before)
        else:
            bounds = meta.cu_q[: meta.num_rows + 1].tolist()
            spans = zip(bounds, bounds[1:], kv_lens.tolist(), strict=False)
            contexts = [
                StepContext(next_tokens=tokens_T[begin:end], start=kv_len - (end - begin))
                for begin, end, kv_len in spans
            ]
            inputs = self.model.prepare_initial_token_inputs(contexts, cache, 1)
        if inputs.kv_cache_inputs is not cache:
            raise ModelError(
                f"{type(self.model).__name__}: its inputs have the cache of another step; pass on the kv_cache_inputs "
                "given to prepare_initial_token_inputs, or those of prev_model_inputs"
            )
        outputs = self.model.execute(inputs)
        self._check(outputs, num_tokens=meta.num_tokens, num_rows=meta.num_rows)
        self._inputs, self._rows, self._kv_lens, self._outputs = inputs, rows, kv_lens, outputs
        self._offsets_R1 = None if meta.num_tokens == meta.num_rows else meta.cu_q_R1[: meta.num_rows + 1]
        return torch.arange(meta.num_tokens, device=tokens_T.device).unsqueeze(1)

    def logits(self, hidden_S1: Tensor, ops: Ops) -> Tensor:
        """fp32 [S, V] of the tokens that `hidden` numbered; of the last step."""
        assert self._outputs is not None
        place_S, outputs = hidden_S1.squeeze(1), self._outputs
        if self.model.return_logits is ReturnLogits.ALL:
            logits = outputs.logits
        else:
            logits = outputs.logits if outputs.next_token_logits is None else outputs.next_token_logits
            if self._offsets_R1 is not None:  # only the last token of a sequence has a row
                place_S = torch.searchsorted(self._offsets_R1[1:], place_S, right=True)
        return logits.index_select(0, place_S).float()

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> None:
        """The model has computed its logits."""

    def whole_logits(self, logits_SV: Tensor) -> Tensor:
        return logits_SV

    def _check(self, outputs: ModelOutputs, *, num_tokens: int, num_rows: int) -> None:
        is_all = self.model.return_logits is ReturnLogits.ALL
        logits = outputs.logits if is_all or outputs.next_token_logits is None else outputs.next_token_logits
        wanted = (num_tokens if is_all else num_rows, self.shape.vocab_size)
        if tuple(logits.shape) != wanted:
            what = "each token" if is_all else "the last token of each sequence"
            raise ModelError(
                f"{type(self.model).__name__}.execute returned logits of shape {tuple(logits.shape)}, it must be "
                f"{wanted}: a row for {what}, a column for each of the vocabulary"
            )

    # ------------------------------------------------------------------ what the engine asks of adopted models

    def has_changed(self) -> bool:
        """Whether modules changed; weights are watched by themselves."""
        return False

    def weights_watched(self) -> None:
        """Nothing is kept that depends on the weights' addresses."""

    def changed_module(self) -> None:
        return None

    def read_changed(self) -> None:
        return None

    def has_same_modules(self) -> bool:
        return True

    def foreign_layer(self) -> str:
        """The name stands for all layers: the engine does not know what they compute."""
        return type(self.model).__name__

    def unpackable(self) -> str:
        """Why no linear uses packed copies of its weights."""
        return f"{self.foreign_layer()} is a model of one's own, which multiplies by its own weights"

    def is_sharded(self) -> bool:
        """Each rank has the whole model."""
        return False

    def waits_for_device(self, ops: Ops, num_tokens: int) -> bool:
        """No graph holds its steps."""
        return True

    def token_counts(self, ops: Ops) -> list[int]:
        return []

    def reducers(self) -> list[Any]:
        return []

    def groups(self) -> list[Any]:
        return []

    def rotary_table(self, num_positions: int) -> None:
        """The model rotates by itself."""
        return

    def packable_weights(self) -> Iterable[Tensor]:
        return ()

    def output_weight(self) -> None:
        return


def _shape_of(model: PipelineModel[Any], params: KVCacheParams, live: torch.nn.Module) -> ModelShape:
    vocab_size = getattr(model.huggingface_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(f"{type(model).__name__}: config.json has no vocab_size; the sampler needs it")
    kv_heads, layers, dtype = params.n_kv_heads, params.num_layers, params.dtype
    query_heads = kv_heads if params.n_heads is None else params.n_heads
    if query_heads % kv_heads:
        raise ModelError(f"{type(model).__name__}: {query_heads} query heads are not a multiple of {kv_heads} kv heads")
    return ModelShape(
        num_layers=layers,
        num_attention_layers=layers,
        num_query_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=params.head_dim,
        hidden_size=query_heads * params.head_dim,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        max_position=model.max_seq_len,
        kv_dtype_bytes=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=sum(parameter.numel() for parameter in live.parameters()),
    )


def _spec_of(params: KVCacheParams) -> AttendSpec:
    heads = params.n_kv_heads if params.n_heads is None else params.n_heads
    return AttendSpec(
        num_kv_heads=params.n_kv_heads,
        group_size=heads // params.n_kv_heads,
        head_dim=params.head_dim,
        scale=params.head_dim**-0.5 if params.scale is None else params.scale,
        window=params.window,
    )


# ---------------------------------------------------------------------- loading


def load_model(
    pipeline_config: PipelineConfig,
    kind: type[PipelineModel[Any]],
    config: InferenceConfig,
    eos_token_id: int | None,
    adapters: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> tuple[PipelineModel[Any], DynamicInferenceEngine]:
    """The model of a resolved configuration, and the engine that runs it. eos_token_id: besides the model's own ids."""
    given = dict(pipeline_config.resolved.llm)
    device = Device(given.get("device", "auto"))
    session = InferenceSession(devices=[device.torch], num_threads=given.get("threads"))
    own_ids = () if eos_token_id is None else (eos_token_id,)
    cache_config = pipeline_config.model.kv_cache
    return_logits = ReturnLogits.LAST_TOKEN
    if pipeline_config.resolved.server.enable_echo:
        return_logits = ReturnLogits.ALL
    elif pipeline_config.sampling.enable_variable_logits:
        return_logits = ReturnLogits.VARIABLE
    if issubclass(kind, McorePipelineModel):
        source, asked = open_source(given["model"]), given.get("dtype", "auto")
        chosen = choose_dtype(asked, device, linear_backend=config.linear_backend)
        dtype = str(chosen).removeprefix("torch.")
        model = kind(
            pipeline_config,
            session,
            source.config(),
            dtype,
            session.devices,
            cache_config,
            source,
            dict(adapters) or None,
            return_logits,
            config=config,
            tokenizer=tokenizer,
            eos_ids=own_ids,
        )
        return model, model.engine
    for format_name in adapters:
        if format_name != SAFETENSORS:
            raise ConfigError(f"weight_adapters has {format_name!r}; the one format is {SAFETENSORS!r}")
    encoding = pipeline_config.effective["quantization_encoding"].value
    if encoding is None:
        raise ConfigError(
            f"quantization_encoding is not set, and {kind.__name__} is not a model whose files say it: set it to "
            "float32 or bfloat16"
        )
    folder = Path(given["model"]).expanduser()
    description = read_description(folder)
    foreign = kind(
        pipeline_config,
        session,
        description,
        encoding,
        session.devices,
        cache_config,
        read_weights(folder),
        adapters.get(SAFETENSORS),
        return_logits,
    )
    engine = foreign_engine(foreign, config, tokenizer=tokenizer, eos_ids=(*directory_end_ids(folder), *own_ids))
    return foreign, engine


def load_engine(**values: Any) -> DynamicInferenceEngine:
    """The engine of a PipelineConfig of these values, of an architecture of one's own: for a server's process."""
    from megatron_infer.pipelines.config import PipelineConfig

    config = PipelineConfig(**values)
    resolved = config.resolved
    kind = resolved.architecture.pipeline_model
    assert kind is not None, f"{resolved.architecture.name} is no architecture of one's own"
    _, engine = load_model(config, kind, resolved.engine, None, {}, open_tokenizer(resolved.llm["model"]))
    return engine


def foreign_engine(
    model: PipelineModel[Any],
    config: InferenceConfig,
    *,
    tokenizer: Tokenizer | None = None,
    eos_ids: Sequence[int] = (),
    name: str | None = None,
) -> DynamicInferenceEngine:
    """The engine of a model of one's own. Raises NotImplementedError for what such a model lacks, by name."""
    kind = type(model).__name__
    refused = {
        "mamba_inference_state_config": "a recurrent state",
        "num_cuda_graphs": "CUDA graphs",
        "pg_collection": "pipeline stages, or tensor-parallel ranks",
    }
    for option, what in refused.items():
        if getattr(config, option) not in (None, 0):
            raise NotImplementedError(f"{option}: {kind} is a model of one's own, which has no {what}; leave it None")
    config = replace(config, num_cuda_graphs=0)
    if not hasattr(type(model), "get_kv_params"):
        raise NotImplementedError(f"{kind} keeps no keys and values (KVCacheMixin), which the engine pages")
    caching: Any = type(model)
    params = caching.get_kv_params(model.huggingface_config, len(model.devices), model.kv_cache_config, model.dtype)
    engine = DynamicInferenceEngine(
        ForeignWeights(model, params),
        config,
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        device=str(model.devices[0]),
        model_name=name or kind,
        owns_weights=True,
    )
    engine.weights.reads_after_idling = True  # the caller made the model and may train it
    model.kv_manager = PagedKVCacheManager(engine)
    return engine


def read_description(folder: Path) -> SimpleNamespace:
    """The content of a model folder's config.json, as attributes. Raises ModelError."""
    path = folder / "config.json"
    try:
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, it must hold a mapping")
    return SimpleNamespace(**content)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the folder's .safetensors files by name; {} without any. Raises ModelError."""
    if not any(folder.glob("*.safetensors")):
        return {}
    reader = SafetensorsReader(folder)
    return {name: reader.read(name) for name in reader.shapes()}
