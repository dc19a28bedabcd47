"""The options of an engine: `InferenceConfig`. `resolve` derives every size from it and a model.

Names, types and defaults are those of megatron-core's `InferenceConfig` as it was first published; below the line
"ours" are fields that it lacks or got later. `InferenceConfig.from_megatron` takes one of any release. Importing this
module needs no torch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_infer.config import checks
from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.from_megatron import config_values
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import FP8_E4M3, KV_DTYPE_BYTES, ModelShape, mtp_shape
from megatron_infer.config.options import CHECKED, checked, choose, option, options_of
from megatron_infer.config.request_metadata import dtype_name
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sizing import add_graphs, budget_of, resolve_sizes
from megatron_infer.config.speculative import SpeculativeConfig, speculative_of
from megatron_infer.errors import ConfigError, check_known

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

WandbModule = ModuleType


class ConfigWarning(UserWarning):
    """An option that acts differently from what its value suggests; the message names what is used instead."""


class PrefixCachingEvictionPolicy(str, Enum):
    """What happens to a cached prefix block that no request holds any more."""

    REF_ZERO = "ref_zero"
    """Dropped at once: prefixes are shared only among requests that overlap in time."""
    LRU = "lru"
    """Kept until its memory is needed; the least recently used block goes first."""


class PrefixCachingCoordinatorPolicy(str, Enum):
    """Which data-parallel rank a coordinator sends a request to."""

    LONGEST_PREFIX = "longest_prefix"
    """The rank with the longest run of matching cached blocks."""
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    """The rank that has the first block of the prompt cached; compares one hash per rank."""
    ROUND_ROBIN = "round_robin"
    """Ranks in turn, whatever they have cached."""
    LOAD_BALANCED = "load_balanced"
    """The rank with the largest share of free rows, whatever it has cached."""


class KVCacheManagementMode(str, Enum):
    """What happens to the large tensors (KV cache, recurrent states) between suspend and resume."""

    PERSIST = "persist"
    """They stay where they are."""
    OFFLOAD = "offload"
    """They are copied to host memory and back."""
    RECOMPUTE = "recompute"
    """They are freed; running requests are recomputed."""


class PreemptionMode(str, Enum):
    """How an evicted request gets its keys and values back."""

    AUTO = "auto"
    """Whichever is faster by measured speeds; recompute where the swap buffer is full."""
    RECOMPUTE = "recompute"
    """They are dropped and recomputed."""
    SWAP = "swap"
    """They are kept in host memory, and recomputed only when the swap buffer is full."""


class BatchingPolicy(str, Enum):
    """What a step plans: decode, prompts, or both."""

    MIXED = "mixed"
    """Each step decodes, and prompts fill the rest of max_tokens: tokens keep coming while prompts are computed."""
    PREFILL_FIRST = "prefill_first"
    """Prompts alone while one can be computed, else decode alone: first tokens come sooner, later ones wait."""
    PHASED = "phased"
    """Decode alone while min_batch_size_tg requests decode, else prompts alone."""


class AttentionChoice(str, Enum):
    """Which backend computes attention."""

    AUTO = "auto"
    """The first that supports the model: on a GPU Triton, torch; on a CPU native, torch."""
    TRITON = "triton"
    """The package's own kernels for GPUs."""
    NATIVE = "native"
    """The package's own C++ kernels, on a CPU."""
    TORCH = "torch"
    """torch operations, on any device."""


class GraphCapture(str, Enum):
    """When CUDA graphs are captured."""

    AUTO = "auto"
    """start on a GPU, first_use on a CPU."""
    START = "start"
    """All graphs while the engine is built and again at a resume that found their memory moved, so that no request
    waits for them: those that only decode first. A shape without a graph runs eagerly."""
    FIRST_USE = "first_use"
    """Each graph when a step first needs it."""


class SamplingChoice(str, Enum):
    """Which backend draws tokens; a seed gives the same tokens with each."""

    AUTO = "auto"
    """The first that can run: on a GPU Triton, torch; on a CPU native, torch."""
    TRITON = "triton"
    """The package's own kernels for GPUs; they can also draw inside CUDA graphs."""
    NATIVE = "native"
    """The package's own C++ kernels, on a CPU."""
    TORCH = "torch"
    """torch operations, on any device."""


class LinearChoice(str, Enum):
    """Which backend multiplies by the model's 2-D weights."""

    AUTO = "auto"
    """On a CPU native where its kernels can run, else vendor; on a GPU vendor."""
    NATIVE = "native"
    """The package's own C++ kernels, on a CPU."""
    VENDOR = "vendor"
    """The vendor's library: on a CPU oneDNN with prepacked weights, on a GPU cuBLAS."""


class StepRanges(str, Enum):
    """Which parts of a step are marked for profilers."""

    OFF = "off"
    """None."""
    ON = "on"
    """schedule, build, layers, sampling and commit."""
    DETAILED = "detailed"
    """Each layer of this stage, too."""


class KVCacheDtype(str, Enum):
    """The dtype of keys and values in the cache."""

    AUTO = "auto"
    """The model's dtype."""
    FP8_E4M3 = "fp8_e4m3"
    """Eight bits without scales: half the memory of bfloat16, half the bytes that decode reads. SmolLM2's log
    probabilities move by 0.09 on average (docs/fp8_cache.md, `kernels.kv_rounding`). Triton kernels from compute
    capability 8.9 on, elsewhere torch operations. Excludes batch_invariant."""


class WeightDtype(str, Enum):
    """The dtype of the copies of weights that linears multiply by."""

    AUTO = "auto"
    """The model's dtype."""
    INT8 = "int8"
    """Packed copies in eight bits, with a scale for each 32 inputs of an output, on a CPU (docs/quantised_weights.md).
    The copies are rounded again after each update, and the inputs of linears to 8 bits. Excludes batch_invariant."""
    INT4 = "int4"
    """Packed copies in four bits, with a scale and a minimum for each 32 inputs of an output; else as int8."""


class GraphSizing(str, Enum):
    """The steps between sizes of CUDA graphs."""

    EXPONENTIAL = "exponential"
    """Each size is twice the one before: few graphs, and a step is padded to at most twice its size."""
    LINEAR = "linear"
    """Many graphs, little padding."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Every option of the engine. Frozen and valid after construction; reads neither environment nor devices.

    Raises ConfigError for a wrong value or an unknown name.
    No option is ignored silently: one that has no effect in some combination warns with `ConfigWarning`.
    """

    block_size_tokens: int = option(256, least=1, since="0.17")
    """Tokens per KV cache block; also the granularity of the prefix cache. Small blocks waste less memory and share
    more, large blocks are faster to read."""
    buffer_size_gb: int | float = option(20, above=0, is_common=True, since="0.17")
    """GiB reserved for the KV cache on each rank, fractions allowed. A buffer above 80 % of the free memory is cut to
    60 % of it, with a warning."""
    paused_buffer_size_gb: int | float | None = option(None, least=0, since="0.17")
    """GiB of the buffer (not on top of it) that paused requests may keep. Requests beyond that are evicted and
    readmitted later (see preemption_mode). None: 0, so that every pause that cannot end at once evicts."""
    mamba_memory_ratio: float | None = option(None, above=0, below=1, since="0.17")
    """Share of both buffers for recurrent states, between 0 and 1; only for models with Mamba layers. None: the states
    of max_requests requests, or one state per KV block where max_requests is None, too."""
    max_requests: int | None = option(None, least=1, is_common=True, since="0.17")
    """The most requests that hold memory at once, and the largest decode batch. None: one per usable block, at most
    max_tokens, rounded down to a multiple of the tensor parallel size and of 4."""
    max_tokens: int | None = option(None, least=1, is_common=True, flag="max-tokens-per-step", since="0.17")
    """The most tokens of one step, decode and prefill together; bounds activation memory. None: 16384. A longer prompt
    needs enable_chunked_prefill."""
    unified_memory_level: int = option(0, least=0, since="0.17")
    """0: the cache is in device memory. 1: it is in unified memory (as all memory of a CPU is), and the paused buffer
    adds to the buffer instead of being a part of it. Excludes kv_cache_management_mode="offload"."""
    kv_cache_management_mode: KVCacheManagementMode = option(
        KVCacheManagementMode.PERSIST, is_common=True, since="0.17"
    )
    """What suspend and resume do with the cache."""
    num_cuda_graphs: int | None = option(None, least=-1, is_common=True, since="0.17")
    """The most step shapes to capture CUDA graphs for; -1: as many as are useful. 0: no graphs, every step runs
    eagerly. None: -1 on a GPU, 0 on a CPU. Steps also run eagerly where a kernel cannot be captured. With `lora` there
    are as many again for steps with adapters."""
    cuda_graph_mixed_prefill_count: int | None = option(16, least=0, acts_with="graphs", since="0.17")
    """The most prefill requests in a graph that prefills (use_cuda_graphs_for_non_decode_steps); steps with more of
    them run eagerly. None: max_requests. 0: no graph prefills. Acts only with CUDA graphs."""
    use_cuda_graphs_for_non_decode_steps: bool = option(False, acts_with="graphs", since="0.17")
    """Capture graphs for steps that prefill, too; off until a report in docs/results shows the checks of graphs ok.
    Acts only with CUDA graphs."""
    static_kv_memory_pointers: bool = option(False, since="0.17")
    """The cache keeps its addresses over suspend and resume, so that CUDA graphs stay valid."""
    max_sequence_length: int = option(2560, least=2, is_common=True, since="0.17")
    """The most tokens of prompt and output together, per request; cut to the positions the model has."""
    mamba_inference_state_config: MambaInferenceStateConfig | None = option(None, flag=None, since="0.17")
    """Recurrent states of a model with Mamba layers (see `MambaInferenceStateConfig.from_model`): needed only for
    dtypes other than the model's; shapes other than the model's are refused. None: the model's own."""
    pg_collection: ProcessGroupCollection | None = option(None, flag=None, in_process=True, since="0.17")
    """megatron-core process groups of a distributed model. Groups that it lacks (None: all groups) are taken from the
    model's own pg_collection; parallel_state is never read."""
    use_flashinfer_fused_rope: bool | None = option(False, since="0.17")
    """Rotate queries and keys with FlashInfer's fused kernel. None: where it is available and the attention backend has
    no fused kernel of its own (Triton and native have). True: an engine that cannot raises and says why."""
    materialize_only_last_token_logits: bool = option(True, since="0.17")
    """Compute logits of each sequence's last token only. Has no effect: only the rows that are needed (sampled
    positions, prompt logprobs) are ever computed, whatever its value."""
    enable_chunked_prefill: bool = option(False, is_common=True, since="0.17")
    """Split prompts into chunks over several steps, to fill max_tokens exactly beside decoding requests; allows prompts
    longer than max_tokens."""
    enable_prefix_caching: bool = option(False, is_common=True, since="0.17")
    """Requests that begin with the same full blocks share them and skip their prefill."""
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = option(
        PrefixCachingEvictionPolicy.REF_ZERO, since="0.17"
    )
    """What happens to a cached block that no request holds. Acts only with enable_prefix_caching."""
    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = option(
        PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK, is_common=True, since="0.17"
    )
    """How a data-parallel coordinator routes requests. A coordinator without a policy of its own uses this one of its
    replicas. Acts only behind a coordinator."""
    track_paused_request_events: bool = option(False, since="0.17")
    """Record an event with a timestamp whenever a request is paused, resumed or evicted."""
    track_generated_token_events: bool = option(False, since="0.17")
    """Record an event with a timestamp for every generated token; costs memory per token."""
    metrics_writer: WandbModule | None = option(None, flag=None, in_process=True, since="0.17")
    """The wandb module (or a run): engine metrics are logged to it every logging_step_interval steps."""
    logging_step_interval: int = option(0, least=0, is_common=True, since="0.17")
    """Steps between two lines of metrics. 0: no metrics."""
    request_metadata_types: list[tuple[str, torch.dtype, bool]] | None = option(None, flag=None, since="0.17")
    """(label, dtype, on the device) of numbers that each request brings: `add_request(metadata={label: number})`. Hooks
    of `engine.on_logits` get them as tensors, on the device or the host, and RequestOutput.metadata has them. None: no
    request brings any."""

    # ours
    attention_backend: AttentionChoice = option(AttentionChoice.AUTO, is_common=True)
    """Which backend computes attention. The engine raises and says why where a named backend does not support the model
    or the device."""
    sampling_backend: SamplingChoice = option(SamplingChoice.AUTO, since="0.18")
    """Which backend draws tokens. The engine raises and says why where a named backend cannot run."""
    linear_backend: LinearChoice = LinearChoice.AUTO
    """Which backend multiplies by the model's 2-D weights. The engine raises and says why where a named backend cannot
    run; answers agree within rounding."""
    step_ranges: StepRanges = StepRanges.OFF
    """Ranges for profilers in every step, NVTX on CUDA, torch.profiler elsewhere. What a CUDA graph replays has none of
    its own; off costs nothing."""
    kv_cache_dtype: KVCacheDtype = option(KVCacheDtype.AUTO, is_common=True)
    """The dtype of keys and values in the cache."""
    weight_dtype: WeightDtype = option(WeightDtype.AUTO, is_common=True)
    """The dtype that linears multiply in. The model's own weights stay as they are."""
    cuda_graph_sizing_distribution: GraphSizing = option(GraphSizing.LINEAR, acts_with="graphs", since="0.19")
    """The steps between sizes of graphs. Acts only with CUDA graphs."""
    cuda_graph_max_tokens: int = option(512, least=1, acts_with="graphs", since="0.19")
    """Tokens of the largest graph that prefills; larger steps that prefill run eagerly. Acts only with CUDA graphs."""
    cuda_graph_all_prefills: bool = option(False, acts_with="graphs", since="0.18")
    """Every step that prefills runs in a graph: graphs reach up to max_tokens, and requests are admitted and prompts
    chunked so that each step fits one. Steps that keep recurrent states for the prefix cache, or fork more sequences
    than a graph has rows, still run eagerly. Needs enable_chunked_prefill. Acts only with CUDA graphs."""
    cuda_graph_capture: GraphCapture = option(GraphCapture.AUTO, acts_with="graphs")
    """When graphs are captured. Acts only with CUDA graphs."""
    overlap: bool | None = option(None, is_common=True)
    """Commit a step while the next one runs on the device: this hides the host's work, results come one step later, and
    tokens stay the same. None: on a GPU True, on a CPU False."""
    max_steps_in_flight: int = option(1, least=1)
    """Steps that are launched before the first of them is read; `overlap` launches one more. Each one more hides more
    of a slow host, brings results one step later, and computes one step in vain behind a stop. Tokens stay the same.
    Only 1 with pipeline stages, which keep steps in flight anyway."""
    batching: BatchingPolicy = BatchingPolicy.MIXED
    """What a step plans. Changes no token."""
    max_queue_size_tg: int | None = option(None, least=1, acts_with="phased")
    """The most requests admitted at once, at most max_requests, which None is. Needs batching="phased"."""
    min_batch_size_tg: int | None = option(None, least=1, acts_with="phased")
    """Requests that decode before prompts wait for them. None: max_queue_size_tg, so that prompts are computed as long
    as more requests can be admitted. Needs batching="phased"."""
    ce_delay_ms: int | float = option(0.0, least=0, acts_with="phased")
    """Milliseconds that a new request waits, so that prompts that arrive shortly after it are computed in the same
    step. Needs batching="phased"."""
    enable_prioritize_first_decode: bool = option(False, acts_with="phased")
    """Requests whose prompt has just ended decode once by themselves before the others: their second token comes
    sooner. Needs batching="phased"."""
    max_batch_total_tokens: int | None = option(None, least=1)
    """The most tokens of all contexts of a step that prefills, decoding requests included; at least
    max_sequence_length. Bounds what attention reads beside a prompt. None: no limit."""
    admission_watermark: float | None = option(None, least=0, most=1)
    """Share of the cache, 0 to 1, that may be in use after a prompt is admitted while other requests run; 0 admits one
    request at a time. None: a few blocks stay free, one for each eight requests and at most 1/16 of the cache."""
    speculative: SpeculativeConfig | None = option(None, flag=None)
    """Draft several tokens a step and verify them in one forward: fewer steps where an answer repeats its context (see
    `SpeculativeConfig`). Changes no token and no log probability. None: one token a step."""
    seed: int = option(0, least=0, flag="engine-seed")
    """Seed of requests without a seed of their own, 0 .. 2**64 - 1. The same seed gives the same tokens whatever else
    is in the batch."""
    logprobs_mode: str = option("raw", choices=("raw", "processed"), is_common=True, since="0.19")
    """Which distribution log probabilities are of. raw: the model's. processed: the one that tokens are sampled from,
    after penalties, temperature and filters."""
    batch_invariant: bool = option(False, is_common=True)
    """Exact mode: a token's log probability has the same bits in any batch, chunk, cache hit or pause, and in a
    training forward under `models.exact_forward.exact_math`. Only on a CPU, in fp32 or bf16, with one rank per
    replica."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """How a request that was evicted for lack of blocks gets its keys and values back. auto and swap act only with
    swap_buffer_size_gb above 0."""
    swap_buffer_size_gb: int | float = option(0, least=0)
    """GiB of host memory, beside the KV buffer, for keys and values of evicted requests; on a CPU it is allocated as it
    is needed, on a GPU machine it is pinned at the start. 0: evicted requests are recomputed."""
    prefix_caching_mamba_gb: float | None = option(None, above=0, default_text="chosen for the model", since="0.17")
    """GiB for recurrent states that the prefix cache keeps, on top of the buffer; only for models with Mamba layers.
    None: no states are kept, so that such a model never finds a cached prefix. Acts only with
    enable_prefix_caching."""
    prefix_caching_routing_alpha: float = option(1.0, least=0, most=1, since="0.17")
    """Weight of cached prefixes in a coordinator's prefix policies, 0 to 1: a rank's score is alpha * the share of the
    prompt it has cached + (1 - alpha) * its share of free rows. 1: the prefix alone decides, and load between equals;
    LLM and a server that are told no policy take 0.5, by which a popular prefix spreads. Acts only behind a
    coordinator."""
    check_invariants: bool = False
    """Check the accounting of blocks, rows and references after every step, and with several ranks that all of them
    plan the same step. For debugging; costs time."""
    collective_timeout_s: int | float = option(120, above=0)
    """Seconds that a rank of a distributed engine may be late or silent before the other ranks raise RankFailure.
    Bounds the collectives of the engine's calls, and those among its ranks in a session's; between calls the process
    groups keep the timeouts they were made with."""
    offset_sampling_seed_by_dp_rank: bool = option(True, since="0.19")
    """Add the data-parallel rank to `seed`, so that replicas draw differently. Requests with a seed of their own draw
    the same everywhere."""
    dp_attention: bool | None = option(False)
    """Data-parallel attention: each expert-parallel rank, with its tensor-parallel ranks or stages, has requests and a
    cache of its own, and tokens go to the ranks of their experts. False: the ranks share their requests, and each
    computes all attention. None: by max_requests, as `megatron-infer plan` says, and False with tensor,
    pipeline or context parallelism."""
    lora: LoRAConfig | None = option(None, flag=None)
    """LoRA adapters: how many serve at once and of which rank, and those loaded at the start (see `LoRAConfig`). None:
    the engine loads none, and no request names one."""
    vocab_size: int | None = option(None, least=1)
    """The number of tokens that exist, where the model's embedding is padded beyond it: no other token is accepted or
    drawn. None: as the model's files say; for a model built by the caller, all rows of the embedding."""

    def __new__(cls, *args: object, **kwargs: object) -> InferenceConfig:
        """Refuse an unknown keyword and name the nearest known one; dataclasses would only name the unknown."""
        check_known(f"{cls.__name__} field", kwargs, options_of(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, one in options_of(InferenceConfig).items():
            check = choose if one.words else checked if one.kind in CHECKED else None
            if check is not None:
                object.__setattr__(self, name, check(one, getattr(self, name)))
        if isinstance(self.mamba_inference_state_config, Mapping):
            state = MambaInferenceStateConfig.from_dict(self.mamba_inference_state_config)
            object.__setattr__(self, "mamba_inference_state_config", state)
        object.__setattr__(self, "speculative", speculative_of(self.speculative))
        if isinstance(self.lora, Mapping):
            object.__setattr__(self, "lora", LoRAConfig.from_dict(self.lora))
        checks.check_values(self)
        for message in checks.without_effect(self):
            warnings.warn(message, ConfigWarning, stacklevel=3)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InferenceConfig:
        """A config from plain values (enums by their string), as a file or a command line has them."""
        return cls(**values)

    @classmethod
    def from_megatron(cls, config: object) -> InferenceConfig:
        """A config from megatron-core's own, 0.17 to 0.19, or from a mapping of its fields.

        0.16 has no such class: give a mapping of the keywords of its DynamicInferenceContext and
        DynamicInferenceEngine.
        Raises ConfigError naming a field that has no counterpart here and is not at its default. docs/configuration.md
        has the table.
        """
        return cls(**config_values(config, {name for name, one in options_of(InferenceConfig).items() if one.since}))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes back; objects of the process (groups, metrics writer) are left out."""
        plain = {name: getattr(self, name) for name, one in options_of(InferenceConfig).items() if not one.in_process}
        if self.request_metadata_types is not None:
            plain["request_metadata_types"] = [[a, dtype_name(b), c] for a, b, c in self.request_metadata_types]
        if self.mamba_inference_state_config is not None:
            plain["mamba_inference_state_config"] = asdict(self.mamba_inference_state_config)
        if self.speculative is not None:
            plain["speculative"] = self.speculative.to_dict()
        if self.lora is not None:
            plain["lora"] = asdict(self.lora) | {"adapters": [list(pair) for pair in self.lora.adapters]}
        return {name: value.value if isinstance(value, Enum) else value for name, value in plain.items()}

    def on_device(self, *, is_cuda: bool) -> InferenceConfig:
        """This config with what it leaves to the device decided: num_cuda_graphs, cuda_graph_capture and overlap.

        Raises ConfigError for what no kernel of the device does.
        """
        if is_cuda and self.weight_dtype is not WeightDtype.AUTO:
            raise ConfigError(
                f"weight_dtype={self.weight_dtype.value!r} needs the native kernels, which run on a CPU; on CUDA leave "
                'it "auto"'
            )
        decided = copy.copy(self)  # not `replace`, which warns once more
        if self.num_cuda_graphs is None:
            object.__setattr__(decided, "num_cuda_graphs", -1 if is_cuda else 0)
        if self.cuda_graph_capture is GraphCapture.AUTO:
            object.__setattr__(decided, "cuda_graph_capture", GraphCapture.START if is_cuda else GraphCapture.FIRST_USE)
        if self.overlap is None:
            object.__setattr__(decided, "overlap", is_cuda)
        return decided

    def resolve(
        self,
        shape: ModelShape,
        *,
        tensor_parallel_size: int = 1,
        available_bytes: int | None = None,
        draft: ModelShape | None = None,
    ) -> ResolvedSizes:
        """Derive every size for one rank's share of a model; `.table()` of the result explains them.

        available_bytes: free memory of the device, None if unknown. draft: one rank's share of the model that drafts.
        Raises CapacityError when the buffer holds no usable block or no recurrent state, ConfigError when sizes
        contradict each other or the model.
        """
        if tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, it must be at least 1")
        checks.check_model(self, shape)
        budget = budget_of(self, shape, available_bytes)
        for message in (*checks.without_effect_on(self, shape), *filter(None, [budget.note])):
            warnings.warn(message, ConfigWarning, stacklevel=2)
        drafts_itself = self.speculative is not None and "mtp" in self.speculative.methods
        if drafts_itself and (shape.num_mtp_layers or not shape.is_stage):
            checks.check_mtp(shape)
            draft = mtp_shape(shape, kv_element_bytes=KV_DTYPE_BYTES[self.kv_dtype_of(shape)])
        elif draft is not None:
            checks.check_draft(self, shape, draft)
        sizes = resolve_sizes(self, shape, budget, tensor_parallel_size=tensor_parallel_size, draft=draft)
        if sizes.max_sequence_length < self.max_sequence_length != InferenceConfig.max_sequence_length:
            warnings.warn(
                f"max_sequence_length is {self.max_sequence_length:,}, the model has {sizes.max_sequence_length:,} "
                "positions: the latter is used",
                ConfigWarning,
                stacklevel=2,
            )
        BatchingLimits.of(self, sizes)
        return add_graphs(self, sizes, shape, tensor_parallel_size=tensor_parallel_size)

    def kv_dtype_of(self, shape: ModelShape) -> str:
        """Name of the torch dtype of keys and values in the cache."""
        return FP8_E4M3 if self.kv_cache_dtype is KVCacheDtype.FP8_E4M3 else shape.dtype
