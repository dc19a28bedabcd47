"""The roofline of a benchmark: limits of this machine's memory and arithmetic, measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_infer.cli.bench_workload import Workload
from megatron_infer.config.step_work import Ceiling, key_flops, kv_token_bytes, state_bytes, state_flops
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES, weight_bytes
from megatron_infer.utils.host import cpu_has_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least work of a workload: every prompt and output token computed once, weights read once per step."""

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


def measure_ceiling(dtype: str, device: str, *, megabytes: int = 512, size: int = 2048) -> Ceiling:
    """Best of five: the sum of a tensor much larger than any cache, and a square matmul in the model's dtype.

    In float32 on a CPU without products of bfloat16: that is what it multiplies such models in.
    """
    kind = getattr(torch, dtype) if device != "cpu" or cpu_has_bf16() else torch.float32
    large = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32, device=device)
    a = torch.randn(size, size, device=device).to(kind)
    b = torch.randn(size, size, device=device).to(kind)
    read_s = _best(lambda: large.sum())
    gemm_s = _best(lambda: a @ b)
    return Ceiling(read_gb_s=large.nbytes / read_s / 1e9, gemm_gflop_s=2 * size**3 / gemm_s / 1e9)


def least_work(
    shape: Any, workload: Workload, *, kv_dtype_bytes: int | None = None, weight_dtype: str = "auto"
) -> Work:
    """Floating-point operations and bytes of a workload on a dense model of `shape` (a ModelShape).

    A token costs 2 operations per parameter, and 4 * N * H per key it sees in every attention layer; a prompt token but
    the last skips the vocabulary projection. Decoding in steps of `concurrency` rows reads the weights, and each row's
    keys and values, once per step. Example: 100 outputs, 10 of them from prompts, 9 at once -> 10 steps.
    A recurrent state costs 5 operations per entry and token (decay, step, C h); it is read and written once per decoded
    token, and written once per prompt. kv_dtype_bytes: bytes of a number in the KV cache; None: the model's.
    weight_dtype: the option, which says what linears read.
    """
    width = torch.finfo(getattr(torch, shape.dtype)).bits // 8
    projection = shape.padded_vocab_size * shape.hidden_size
    num_weights = shape.num_parameters
    is_rounded = weight_dtype in WEIGHT_DTYPE_BYTES
    weights = weight_bytes(weight_dtype, num_weights, projection) if is_rounded else num_weights * width
    kv_token, per_key = kv_token_bytes(shape, kv_dtype_bytes), key_flops(shape)
    prompts, samples = [len(prompt) for prompt in workload.prompts], workload.num_samples
    keys_prefill = sum(n * (n + 1) // 2 for n in prompts)
    # The first output token is sampled at the prompt's last position; token i sees n + i - 1 keys.
    keys_decode = samples * sum(
        (out - 1) * n + (out - 1) * out // 2 for n, out in zip(prompts, workload.output_lens, strict=True)
    )
    decoded = workload.num_output_tokens - len(prompts) * samples
    per_state, state = state_flops(shape), state_bytes(shape)
    steps = -(-decoded // (workload.concurrency * samples))
    prefill_tokens = sum(prompts)
    return Work(
        prefill_flops=2 * (prefill_tokens * (shape.num_parameters - projection) + len(prompts) * projection)
        + per_key * keys_prefill
        + per_state * prefill_tokens,
        decode_flops=(2 * shape.num_parameters + per_state) * decoded + per_key * keys_decode,
        prefill_bytes=weights + kv_token * prefill_tokens + state * len(prompts),
        decode_bytes=weights * steps + kv_token * keys_decode + 2 * state * decoded,
    )


def _best(action: Callable[[], Tensor]) -> float:
    action()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        float(action().flatten()[0])  # reading a value waits for it on any device
        times.append(time.perf_counter() - started)
    return min(times)
