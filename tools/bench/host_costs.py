"""What a decode step costs the host for each layer on a GPU without CUDA graphs, measured without a GPU.

    python tools/bench/host_costs.py [--batch 1] [--layers 4 12]

Kernels are compiled for an H100 and launched on a driver that does nothing (tests/support/stub_driver.py). A
layer's cost is the difference between a deep and a shallow decoder over the difference of their depths, in CPU time of
one thread, the least of many repeats. Linears and allocations are torch's on a CPU, of sizes at which only the calls
remain: CUDA's own (cuBLAS, a caching allocator) and the driver's part of a launch are not in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.ssm import LayerStates, RecurrentSpec, SsmWeights
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from step_rows import step_of
from stub_driver import stubbed

KINDS = ("llama", "moe", "mamba")
HEADS, KV_HEADS, HEAD_DIM, BLOCK, KEYS = 4, 2, 16, 16, 512
LAYERS: dict[str, Any] = {
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_query_groups": KV_HEADS,
    "kv_channels": HEAD_DIM,
    "ffn_hidden_size": 64,
}


class Step:
    """Decode rows of KEYS keys each, as `runner.batch.Batch` gives them to the layers."""

    is_padded = False
    padding_T1 = routing_TLK = lora = absorbed_S = tokens_of_ranks = None

    def __init__(self, batch: int, num_layers: int) -> None:
        from megatron_infer.kernels.triton import attention, elementwise, scan

        device, blocks = torch.device("cpu"), KEYS // BLOCK
        self.ops = elementwise.make(device, torch.float32)
        self.attention = attention.TritonPagedAttention(num_cores=132, shared_kib=227)
        self.scan = scan.TritonScan()
        self.states: LayerStates | None = None
        self.kv_cache = torch.zeros(num_layers, 2, batch * blocks + 1, BLOCK, KV_HEADS, HEAD_DIM)
        self.num_tokens, self.token_ids_T = batch, torch.ones(batch, dtype=torch.long)
        self.meta = step_of(
            [(1, KEYS)] * batch,
            num_decode=batch,
            table_row=range(batch),
            block_table=torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks),
            block_size=BLOCK,
            cos_TR=torch.ones(batch, HEAD_DIM),
            sin_TR=torch.zeros(batch, HEAD_DIM),
        )
        self.positions_T = self.meta.positions_T

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        return self.attention.run(q_TKGH, k_TKH, v_TKH, self.kv_cache, layer=layer, spec=spec)

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
        if self.states is None:
            sizes = spec.num_heads, spec.head_dim, spec.state_dim
            conv_SCW = torch.zeros(self.num_tokens, spec.num_channels, spec.conv_width)
            self.states = LayerStates(conv_SCW, torch.zeros(self.num_tokens, *sizes))
        return self.scan.run(xBC_TC, dt_TX, self.states, weights, spec)

    def run_program(self, *_: Any) -> None:
        return None


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    """The least CPU time of one call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e3


def decoder(kind: str, num_layers: int) -> AdoptedModel:
    settings: dict[str, Any] = dict(LAYERS) | {"num_layers": num_layers}
    if kind == "moe":  # layers of experts alone, after one of attention
        settings |= {"num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 16}
        settings |= {"moe_grouped_gemm": False, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        return adopt(tiny_hybrid("*" + "E" * num_layers, **settings))
    if kind == "mamba":
        return adopt(tiny_hybrid("*" + "M" * num_layers, **LAYERS))
    return adopt(tiny_gpt(**settings).eval())


def forward_of(adopted: AdoptedModel, step: Step) -> Callable[[], Any]:
    adopted.weights_watched()  # as an engine's are

    def run() -> None:
        step.attention.plan(step.meta)
        step.scan.plan(step.meta)
        adopted.hidden(step)  # type: ignore[arg-type]

    return run


class Operations(TorchDispatchMode):
    """Counts torch's operations that compute something: one launch each on a GPU."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], Any]) -> int:
    """Of Triton's kernels and of torch's operations."""
    kernels: list[str] = []
    with Operations() as operations, listening(lambda launch, kernel, *_: kernels.append(kernel.fn.__name__)):
        call()
    return len(kernels) + operations.num


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 12], help="a shallow and a deep decoder")
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what no kernel has written may be slow to multiply
    shallow, deep = options.layers
    with tempfile.TemporaryDirectory() as folder, stubbed(Path(folder)):
        for kind in KINDS:
            runs = [
                forward_of(decoder(kind, depth), Step(options.batch, depth if kind == "llama" else 1))
                for depth in (shallow, deep)
            ]
            few, many = (microseconds(run, options.repeats) for run in runs)
            fewer, more = map(launches, runs)
            us, num_launches = ((b - a) / (deep - shallow) for a, b in ((few, many), (fewer, more)))
            said = f"{us:7.1f} us of host a layer, {num_launches:g} launches (decode, batch {options.batch})"
            print(f"{kind:6} {said}", flush=True)


if __name__ == "__main__":
    main()
