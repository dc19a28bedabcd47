"""What a decoder step costs beside its arithmetic: a model so small that only calls remain.

    python tools/bench/layer_overhead.py [--layers 30] [--hidden 64] [--batch 1 16]

Prints ms per step of the adopted model's own loop, of megatron-core's decoder over our layers, of the stock modules,
and of the same operators called bare (the floor). Attention is left out: its value projection passes through.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.cpu_torch import TorchOps
from megatron_infer.models.adopt import adopt
from megatron_infer.testing.tiny import tiny_gpt


class NoAttention:
    """A step whose attention gives back the values."""

    def __init__(self, batch: int) -> None:
        self.num_tokens, self.ops = batch, TorchOps()
        self.token_ids_T, self.positions_T = torch.ones(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long)

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        return v_TKH.flatten(1).contiguous()

    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True


def milliseconds(function: Callable[[], Any], repeats: int = 200) -> tuple[float, float]:
    """(median, least) of `repeats` calls."""
    for _ in range(10):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2], min(times)


def bare(model: Any, hidden_TD: Tensor) -> Tensor:
    """The decoder as operators only."""
    size = model.config.hidden_size
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        x = F.linear(F.rms_norm(hidden_TD, (size,), layer.input_layernorm.weight, 1e-5), attention.linear_qkv.weight)
        hidden_TD = hidden_TD + F.linear(x[:, 2 * size :].contiguous(), attention.linear_proj.weight)
        x = F.linear(F.rms_norm(hidden_TD, (size,), layer.pre_mlp_layernorm.weight, 1e-5), mlp.linear_fc1.weight)
        gate, up = x.chunk(2, -1)
        hidden_TD = hidden_TD + F.linear(F.silu(gate) * up, mlp.linear_fc2.weight)
    return F.rms_norm(hidden_TD, (size,), model.decoder.final_layernorm.weight, 1e-5)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": 1,
        "num_query_groups": 1,
        "ffn_hidden_size": 2 * options.hidden,
        "position_embedding_type": "none",
    }
    model, stock = tiny_gpt(**settings), tiny_gpt(**settings)
    adopted = adopt(model)
    for layer in stock.decoder.layers:
        core = layer.self_attention.core_attention
        core.forward = lambda q, k, v, *_, **__: v.flatten(2)
    for batch in options.batch:
        step, hidden = NoAttention(batch), torch.randn(batch, 1, options.hidden)
        rows = {
            "adopted, own loop": lambda step=step: adopted.hidden(step),
            "adopted, megatron-core's decoder": lambda step=step, hidden=hidden: model.decoder(
                hidden_states=hidden, attention_mask=None, inference_context=step
            ),
            "stock modules": lambda hidden=hidden: stock.decoder(hidden_states=hidden, attention_mask=None),
            "bare operators": lambda hidden=hidden: bare(model, hidden.squeeze(1)),
        }
        for name, function in rows.items():
            median, least = milliseconds(function)
            print(f"batch {batch:3d}  {name:34s} median {median:7.2f} ms   least {least:7.2f} ms")


if __name__ == "__main__":
    main()
