"""One Mamba layer's convolution and scan over one prompt, apart from the rest of a model."""

from __future__ import annotations

import numpy as np
import torch

from light.engine import BLOCK, Bench
from light.machine import Ceilings, seconds
from light.measures import Row
from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.select import choose
from megatron_infer.kernels.ssm import LayerStates, SsmSpec, SsmWeights
from megatron_infer.testing.inspect import inspect


def one_prompt(length: int, device: torch.device) -> StepMetadata:
    """A step of one fresh prompt, whose state is in slot 0; what only attention looks at is empty."""
    lengths = np.array([length], dtype=np.int32)
    cu_q, zero = np.array([0, length], dtype=np.int32), np.zeros(1, dtype=np.int32)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    q_len_R, cu_q_R1, table_row_R = (torch.from_numpy(part).to(device) for part in (lengths, cu_q, zero))
    return StepMetadata(
        num_tokens=length,
        num_rows=1,
        num_decode=0,
        q_len=lengths,
        kv_len=lengths,
        cu_q=cu_q,
        table_row=zero,
        num_prompt_queries=lengths,
        q_len_R=q_len_R,
        kv_len_R=q_len_R,
        cu_q_R1=cu_q_R1,
        table_row_R=table_row_R,
        block_table=torch.empty(1, 0, dtype=torch.int32, device=device),
        positions_T=nothing,
        kv_pos_T=nothing,
        cos_TR=None,
        sin_TR=None,
    )


def random_layer(spec: SsmSpec, device: torch.device, dtype: torch.dtype) -> tuple[SsmWeights, LayerStates]:
    """Weights of a layer and one slot of its states."""

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device)

    weights = SsmWeights(
        conv_CW=random(spec.num_channels, spec.conv_width) - 0.5,
        conv_bias_C=random(spec.num_channels),
        decay_H=-1.0 - random(spec.num_heads),
        skip_H=random(spec.num_heads),
        dt_bias_H=random(spec.num_heads) - 2.5,
    )
    conv = torch.zeros(1, spec.num_channels, spec.conv_width, dtype=dtype, device=device)
    return weights, LayerStates(conv, torch.zeros(1, spec.num_heads, spec.head_dim, spec.state_dim, device=device))


def prompt_scan(bench: Bench, ceilings: Ceilings, *, length: int, dtype: torch.dtype) -> list[Row]:
    """Bytes that must move (x, B, C and dt in, y out) a second, against a copy; [] for a model without Mamba layers.

    Arithmetic beside it: 2*L*(N/heads of a group + P) + 4*P*N FLOP a token and head, chunks of L = 64 tokens.
    """
    specs, device = inspect(bench.engine).adopted.ssm_specs, bench.device
    if not specs:
        return []
    spec = specs[0]
    backend = choose(device, dtype, specs=(), block_size=BLOCK, ssm_specs=[spec]).scan
    assert backend is not None
    weights, states = random_layer(spec, device, dtype)
    fused_TX = torch.randn(length, spec.num_channels + spec.num_heads, device=device).to(dtype)
    parts = fused_TX.split((spec.num_channels, spec.num_heads), dim=-1)
    backend.plan(one_prompt(length, device))
    taken = seconds(lambda: backend.run(*parts, states, weights, spec), device, rounds=5)
    moved = (fused_TX.numel() + length * spec.inner_width) * fused_TX.element_size()
    shared = spec.state_dim * spec.num_groups // spec.num_heads
    flops = length * spec.num_heads * (128 * (shared + spec.head_dim) + 4 * spec.head_dim * spec.state_dim)
    rate = moved / taken / 1e9
    return [
        {
            "what": f"scan of a layer, prompt {length}, {backend.name}",
            "ms": taken * 1e3,
            "gb_s": rate,
            "tflop_s": flops / taken / 1e12,
            "share": rate / ceilings.copy_gb_s,
            "tokens_s": length / taken,
        }
    ]
