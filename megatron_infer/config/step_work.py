"""Bytes, floating-point operations and launches of a step, by part of the model, and of a workload. Needs no torch.

`megatron-infer plan --roofline` prints them; `megatron-infer bench` and tools/bench/speed_of_light.py compare their
measurements with them. Bytes are the least that must move: every weight that the step needs once, every key, value and
state once, logits once out and once in. Activations are not counted; a decode step keeps them in the device's cache.
Launches are those of `kernels.triton`, with one for each product, a draw as within a CUDA graph, and no captures of
states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_infer.config.model_shape import LOGIT_BYTES, ModelShape, kv_token_bytes, state_bytes
from megatron_infer.kernels import triton_scratch as scratch
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES, weight_bytes

DRAW_LAUNCHES = 3
"""Launches of a draw within a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Limits of a device, measured or published."""

    read_gb_s: float
    gemm_gflop_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time that moves the bytes and does the arithmetic, both at once."""
        return max(num_bytes / (self.read_gb_s * 1e9), flops / (self.gemm_gflop_s * 1e9))


PUBLISHED = {
    "h100": Ceiling(read_gb_s=3350, gemm_gflop_s=989_400),
    "h200": Ceiling(read_gb_s=4800, gemm_gflop_s=989_400),
    "b200": Ceiling(read_gb_s=8000, gemm_gflop_s=2_250_000),
}
"""Peak bandwidth and dense bf16 arithmetic, as NVIDIA publishes them (`PUBLISHED_SOURCE`)."""
PUBLISHED_SOURCE = (
    "NVIDIA's data sheets: H100 SXM 3.35 TB/s, H200 SXM 4.8 TB/s, 989.4 TFLOP/s of bf16; "
    "HGX B200 8 TB/s, 2,250 TFLOP/s; no sparsity"
)
LAUNCH_GAP_US = 1.0
"""An assumption, not measured: the device drains and fills between two kernels of a CUDA graph."""


def key_flops(shape: ModelShape) -> int:
    """Operations of one query with one key it sees, all layers: two products of a multiply and an add."""
    return 2 * shape.num_attention_layers * shape.num_query_heads * (shape.head_dim + shape.value_dim)


def state_flops(shape: ModelShape) -> int:
    """Operations of one token in all recurrences: 5 for each entry of a state (decay, step, C h)."""
    return 0 if shape.state is None else 5 * shape.state.num_layers * math.prod(shape.state.ssm_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadWork:
    """The least work of a workload: each prompt and output token is computed once, weights are read once a step."""

    prefill_flops: float
    decode_flops: float
    prefill_bytes: float
    decode_bytes: float

    @property
    def flops(self) -> float:
        return self.prefill_flops + self.decode_flops

    @property
    def bytes(self) -> float:
        return self.prefill_bytes + self.decode_bytes

    def best_seconds(self, ceiling: Ceiling) -> float:
        """Prefill, then decode, each limited by the slower of arithmetic and memory."""
        prefill = ceiling.seconds(self.prefill_bytes, self.prefill_flops)
        return prefill + ceiling.seconds(self.decode_bytes, self.decode_flops)


def least_work(
    shape: ModelShape,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    concurrency: int,
    num_samples: int = 1,
    kv_dtype_bytes: int | None = None,
    weight_dtype: str = "auto",
) -> WorkloadWork:
    """Operations and bytes of `num_samples` answers to each prompt, `concurrency` prompts at once, on a dense model.

    A token costs 2 operations per parameter, and `key_flops` for each key that it sees. A prompt token except the last
    skips the vocabulary projection. A decode step of `concurrency * num_samples` rows reads the weights, and each row's
    keys and values, once. Example: 100 outputs, 10 of them from prompts, 9 rows -> 10 steps.
    A recurrent state is read and written once for each decoded token, and written once for each prompt.
    kv_dtype_bytes: bytes of a number in the KV cache; None: the model's. weight_dtype: the option of InferenceConfig.
    """
    projection = shape.padded_vocab_size * shape.hidden_size
    if weight_dtype in WEIGHT_DTYPE_BYTES:
        weights = weight_bytes(weight_dtype, shape.num_parameters, projection)
    else:
        weights = shape.weight_bytes
    kv_token, per_key = kv_token_bytes(shape, kv_dtype_bytes), key_flops(shape)
    keys_prefill = sum(n * (n + 1) // 2 for n in prompt_lens)
    # The first output token is sampled at the prompt's last position; token i sees n + i - 1 keys.
    keys_decode = num_samples * sum(
        (out - 1) * n + (out - 1) * out // 2 for n, out in zip(prompt_lens, output_lens, strict=True)
    )
    decoded = (sum(output_lens) - len(prompt_lens)) * num_samples
    per_state, state = state_flops(shape), state_bytes(shape)
    steps = -(-decoded // (concurrency * num_samples))
    prefill_tokens = sum(prompt_lens)
    return WorkloadWork(
        prefill_flops=2 * (prefill_tokens * (shape.num_parameters - projection) + len(prompt_lens) * projection)
        + per_key * keys_prefill
        + per_state * prefill_tokens,
        decode_flops=(2 * shape.num_parameters + per_state) * decoded + per_key * keys_decode,
        prefill_bytes=weights + kv_token * prefill_tokens + state * len(prompt_lens),
        decode_bytes=weights * steps + kv_token * keys_decode + 2 * state * decoded,
    )


class Part(NamedTuple):
    """What one part of the model does in a step, all its layers together."""

    name: str
    num_bytes: int
    flops: int
    num_launches: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step, part by part."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def num_launches(self) -> int:
        return sum(part.num_launches for part in self.parts)

    def seconds(self, ceiling: Ceiling, *, gap_us: float = 0.0) -> float:
        """One part after the other, each at the device's limits; gap_us: of each launch."""
        taken = sum(ceiling.seconds(part.num_bytes, part.flops) for part in self.parts)
        return taken + self.num_launches * gap_us * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer's parts, and how many layers have them."""

    norm: int
    qkv: int
    """With the norms of queries and keys, and the indexer of sparse attention."""
    indexer: int
    """Of sparse attention; part of qkv."""
    proj: int
    mlp: int
    router: int
    """With the projections into the experts' latent space and out of it."""
    expert: int
    """One routed expert."""
    shared_experts: int
    mixer: int
    num_mlps: int
    num_moes: int
    num_mixers: int
    num_experts: int
    """Experts of one layer; 0: the model has none."""
    has_head_norms: bool
    """Queries and keys are normalised, in two launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounter:
    """Counts the work of steps of one model on one device."""

    shape: ModelShape
    parameters: LayerParameters
    kv_element_bytes: int | None = None
    """Bytes of a number in the KV cache; None: the model's."""

    def decode(self, rows: int, context: int) -> StepWork:
        """`rows` requests draw a token each, which sees `context` keys, its own included."""
        return self.step(rows, 1, context)

    def prefill(self, num_tokens: int) -> StepWork:
        """A prompt of `num_tokens` tokens, whole in one step, of which the last draws."""
        return self.step(1, num_tokens, num_tokens)

    def step(self, rows: int, queries: int, keys: int) -> StepWork:
        """Each of `rows` requests computes the last `queries` of `keys` tokens and draws one token."""
        assert rows > 0 and 0 < queries <= keys, (rows, queries, keys)
        shape, of, tokens = self.shape, self.parameters, rows * queries
        width, hidden, vocab = shape.kv_dtype_bytes, shape.hidden_size, shape.padded_vocab_size
        logits = rows * vocab * LOGIT_BYTES
        decodes = queries == 1
        # Ids and positions are gathered in one launch; the embedding is read, and the fp32 residual made of it.
        parts = [Part("embedding", tokens * hidden * width, 0, 3)]
        attends = shape.num_attention_layers

        def linear(name: str, layers: int, parameters: int, launches: int) -> None:
            if layers:
                parts.append(
                    Part(name, layers * parameters * width, 2 * layers * parameters * tokens, layers * launches)
                )

        linear("norm and qkv", attends, of.norm + of.qkv, 2 + 2 * of.has_head_norms)
        if attends:
            pairs = rows * (queries * keys - queries * (queries - 1) // 2)
            moved = rows * keys * kv_token_bytes(shape, self.kv_element_bytes)
            launches = attends * self._attention_launches(queries, keys)
            parts.append(Part("attention", moved, key_flops(shape) * pairs, launches))
        linear("proj", attends, of.proj, 1)
        mixers = of.num_mixers
        linear("Mamba: norms, in_proj, out_proj", mixers, of.norm + of.mixer, 4)
        if mixers:
            times = 2 if keys > queries else 1  # a prompt begins without a state
            moved = times * rows * state_bytes(shape)
            launches = mixers * (2 if decodes else self._slice_launches(queries)) + (not decodes)
            parts.append(Part("Mamba: conv and scan", moved, state_flops(shape) * tokens, launches))
        linear("norm and MLP", of.num_mlps, of.norm + of.mlp, 4)
        if of.num_moes:
            parts.append(self._experts(tokens))
        head = shape.hidden_size * vocab
        # Of a prompt the last token's hidden states are selected first.
        parts.append(
            Part("norm and output layer", (of.norm + head) * width + logits, 2 * head * rows, 2 + (not decodes))
        )
        parts.append(Part("sampling", logits, 0, DRAW_LAUNCHES))
        return StepWork(tuple(parts))

    def _experts(self, tokens: int) -> Part:
        """Experts that at least one token chose are read; chosen evenly, 1 - (1 - k / E) ** T of all."""
        of, shape = self.parameters, self.shape
        assert shape.experts is not None
        top_k, count = shape.experts.top_k, of.num_experts
        always = of.norm + of.router + of.shared_experts
        chosen = min(count, math.ceil(count * (1 - (1 - top_k / count) ** tokens)))
        # norm, router, choice, sort, fc1, activation, fc2, sum; and the shared experts
        launches = 8 + (3 if of.shared_experts else 0)
        return Part(
            "norm, router, experts",
            of.num_moes * (always + chosen * of.expert) * shape.kv_dtype_bytes,
            2 * of.num_moes * (always + top_k * of.expert) * tokens,
            of.num_moes * launches,
        )

    def _attention_launches(self, queries: int, keys: int) -> int:
        """Launches of one layer: rotation with the append, the kernel, and the merge of a decode row's split keys."""
        if queries > 1:
            return 2
        split = scratch.decode_splits(keys, scratch.max_decode_splits(self.shape.num_kv_heads)) > 1
        return 2 + split

    def _slice_launches(self, queries: int) -> int:
        """Launches of one layer's convolution and recurrence; tokens find their rows once a step."""
        if self.shape.state is not None and self.shape.state.is_delta:
            return 2 + 2
        return 2 + 3 + (3 if queries >= scratch.SCAN_SEGMENT else 0)
