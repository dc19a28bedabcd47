"""One Mamba-2 layer on every scan backend, and in transformers without kernels.

The layer is that of mamba2-130m: hidden 768, 24 heads of 64, state 128, one group, four taps. Every layer has its own
weights and states, so that in decode they come from memory as they do in a model; our states lie in scattered slots of
a pool.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer.cli.bench import measure_ceiling
from megatron_infer.kernels import packing
from megatron_infer.kernels.base import Ops, StepMetadata
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativeOps, panel_layout
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.ssm import LayerStates, ScanBackend, SsmSpec, SsmWeights
from megatron_infer.kernels.torch.cpu_torch import TorchOps
from megatron_infer.kernels.torch.ssm_torch import TorchScan

HIDDEN = 768
SPEC = SsmSpec(num_heads=24, head_dim=64, state_dim=128, num_groups=1, conv_width=4)
WORKS: dict[str, tuple[int, int]] = {
    "prefill 1 x 512": (1, 512),
    "prefill 8 x 64": (8, 64),
    "decode 1": (1, 1),
    "decode 16": (16, 1),
    "decode 64": (64, 1),
}
"""Rows and tokens of each."""
PEER = "transformers"
SPLIT = [SPEC.inner_width, SPEC.num_channels, SPEC.num_heads]


class Peer:
    """transformers' mixers with their cache."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        from transformers import Mamba2Config
        from transformers.models.mamba2 import modeling_mamba2

        self.module = modeling_mamba2
        self.config = Mamba2Config(
            hidden_size=HIDDEN,
            num_heads=SPEC.num_heads,
            head_dim=SPEC.head_dim,
            state_size=SPEC.state_dim,
            n_groups=SPEC.num_groups,
            conv_kernel=SPEC.conv_width,
            num_hidden_layers=layers,
            vocab_size=8,
        )
        torch.manual_seed(0)
        self.mixers = [modeling_mamba2.Mamba2Mixer(self.config, layer).eval().to(dtype) for layer in range(layers)]

    def cache(self, rows: int, dtype: torch.dtype) -> object:
        """A cache whose rows have seen eight tokens."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        for mixer in self.mixers:
            mixer(torch.randn(rows, 8, HIDDEN).to(dtype), cache)
        return cache

    def mixer(self, hidden_RLD: Tensor) -> Callable[[], object]:
        """The whole mixers: a prompt fills a cache of its own, a token goes on from one."""
        rows, length, _ = hidden_RLD.shape
        old = self.cache(rows, hidden_RLD.dtype) if length == 1 else None

        def run() -> None:
            from transformers import DynamicCache

            cache = old or DynamicCache(config=self.config)
            for mixer in self.mixers:
                mixer(hidden_RLD, cache)

        return run

    def scan(self, hidden_RLD: Tensor) -> Callable[[], object]:
        """The mixers' convolution and scan as their forward calls them, on projected inputs."""
        module, rows, length = self.module, *hidden_RLD.shape[:2]
        groups, heads = (SPEC.num_groups, SPEC.state_dim), (SPEC.num_heads, SPEC.head_dim)
        sizes = [SPEC.inner_width, SPEC.num_groups * SPEC.state_dim, SPEC.num_groups * SPEC.state_dim]
        inputs = [mixer.in_proj(hidden_RLD).split(SPLIT, dim=-1)[1:] for mixer in self.mixers]
        conv_states = [torch.randn(rows, SPEC.num_channels, SPEC.conv_width).to(hidden_RLD.dtype) for _ in inputs]
        states = [torch.randn(rows, *heads, SPEC.state_dim) for _ in inputs]

        def prompt(mixer: object, xBC: Tensor, dt: Tensor, layer: int) -> None:
            taps, decay = mixer.conv1d.weight.squeeze(1), -torch.exp(mixer.A_log.float())
            raw = xBC.transpose(1, 2)
            conv_states[layer].copy_(raw[:, :, -SPEC.conv_width :])
            mixed = module.causal_conv1d_fn(raw, taps, mixer.conv1d.bias, activation="silu").transpose(1, 2)
            x, b, c = mixed.split(sizes, dim=-1)
            _, state = module.mamba2_chunk_scan(
                x.view(rows, length, *heads),
                dt,
                decay,
                b.view(rows, length, *groups),
                c.view(rows, length, *groups),
                chunk_size=mixer.chunk_size,
                D=mixer.D,
                dt_bias=mixer.dt_bias,
                dt_softplus=True,
                return_final_states=True,
            )
            states[layer].copy_(state)

        def token(mixer: object, xBC: Tensor, dt: Tensor, layer: int) -> None:
            taps, decay = mixer.conv1d.weight.squeeze(1), -torch.exp(mixer.A_log.float())
            mixed = module.causal_conv1d_update(
                xBC.transpose(1, 2), conv_states[layer], taps, mixer.conv1d.bias, activation="silu"
            ).transpose(1, 2)
            x, b, c = mixed.split(sizes, dim=-1)
            module.mamba2_selective_state_update(
                states[layer],
                x.view(rows, *heads),
                dt.transpose(1, 2).expand(-1, -1, SPEC.head_dim),
                decay[:, None, None].expand(-1, SPEC.head_dim, SPEC.state_dim),
                b.view(rows, *groups),
                c.view(rows, *groups),
                mixer.D[:, None].expand(-1, SPEC.head_dim),
                dt_bias=mixer.dt_bias[:, None].expand(-1, SPEC.head_dim),
                dt_softplus=True,
            )

        one = token if length == 1 else prompt
        return lambda: [one(self.mixers[i], *parts, i) for i, parts in enumerate(inputs)]


class Ours:
    """The same layers on one of our backends."""

    def __init__(self, peer: Peer, backend: ScanBackend, ops: Ops) -> None:
        self.backend, self.ops, self.mixers = backend, ops, peer.mixers
        self.weights = [
            SsmWeights(
                conv_CW=mixer.conv1d.weight.squeeze(1).float().contiguous(),
                conv_bias_C=mixer.conv1d.bias.float(),
                decay_H=-mixer.A_log.float().exp(),
                skip_H=mixer.D.float(),
                dt_bias_H=mixer.dt_bias.float(),
            )
            for mixer in self.mixers
        ]

    def states(self, num_slots: int, dtype: torch.dtype) -> list[LayerStates]:
        """Of every layer: a slot holds the states of all of them."""
        layers, heads = len(self.mixers), (SPEC.num_heads, SPEC.head_dim, SPEC.state_dim)
        conv = torch.randn(num_slots, layers, SPEC.num_channels, SPEC.conv_width).to(dtype)
        ssm = torch.randn(num_slots, layers, *heads)
        return [LayerStates(conv[:, layer], ssm[:, layer]) for layer in range(layers)]

    def scan(self, hidden_RLD: Tensor) -> Callable[[], object]:
        rows, length, _ = hidden_RLD.shape
        step, states = make_step(rows, length), self.states(rows + 8, hidden_RLD.dtype)
        inputs = [mixer.in_proj(hidden_RLD.flatten(0, 1)).split(SPLIT, dim=-1)[1:] for mixer in self.mixers]

        def run() -> None:
            self.backend.plan(step)
            for parts, state, weights in zip(inputs, states, self.weights, strict=True):
                self.backend.run(*parts, state, weights, SPEC)

        return run

    def mixer(self, hidden_RLD: Tensor) -> Callable[[], object]:
        rows, length, _ = hidden_RLD.shape
        step, states, ops = make_step(rows, length), self.states(rows + 8, hidden_RLD.dtype), self.ops
        hidden_TD = hidden_RLD.flatten(0, 1)

        def run() -> None:
            self.backend.plan(step)
            for mixer, state, weights in zip(self.mixers, states, self.weights, strict=True):
                gate, xBC, dt = ops.linear(hidden_TD, mixer.in_proj.weight).split(SPLIT, dim=-1)
                y = self.backend.run(xBC, dt, state, weights, SPEC)
                y = ops.gated_rms_norm(y, gate, mixer.norm.weight, 1e-5, group_size=SPEC.inner_width)
                ops.linear(y, mixer.out_proj.weight)

        return run


def make_step(rows: int, length: int) -> StepMetadata:
    """Fresh prompts, or decode rows at position 8, in scattered slots."""
    q_len = np.full(rows, length, dtype=np.int32)
    kv_len = q_len if length > 1 else q_len + 8
    cu_q = np.arange(rows + 1, dtype=np.int32) * length
    slots = torch.randperm(rows + 8)[:rows].numpy().astype(np.int32)
    empty, none = torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int32)
    return StepMetadata(
        num_tokens=rows * length,
        num_rows=rows,
        num_decode=rows if length == 1 else 0,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=slots,
        num_prompt_queries=np.zeros_like(q_len),
        q_len_R=torch.from_numpy(q_len),
        kv_len_R=torch.from_numpy(kv_len),
        cu_q_R1=torch.from_numpy(cu_q),
        table_row_R=torch.from_numpy(slots),
        block_table=none,
        positions_T=empty,
        kv_pos_T=empty,
        cos_TR=None,
        sin_TR=None,
    )


def our_backends(peer: Peer, dtype: torch.dtype) -> dict[str, Ours]:
    weights = [weight for mixer in peer.mixers for weight in (mixer.in_proj.weight, mixer.out_proj.weight)]
    packed = packing.PackedLinears(reason=packing.unavailable(dtype))
    packed.pack(weights)
    ours = {"torch": Ours(peer, TorchScan(), TorchOps(packed))}
    try:
        library = native_build.load()
    except native_build.NativeUnavailable as error:
        print(f"no native kernels: {error}")
        return ours
    panels = packing.PackedLinears(layout=panel_layout(library, dtype))
    panels.pack(weights)
    ours["native"] = Ours(peer, NativeScan(library, dtype), NativeOps(library, dtype, panels))
    return ours


def update_rate() -> float:
    """Bytes a second read and written by an in-place product over a buffer larger than the caches, best of five."""
    buffer, seconds = torch.ones(128 << 20), []
    for _ in range(6):
        began = time.perf_counter()
        buffer.mul_(1.0)
        seconds.append(time.perf_counter() - began)
    return 2 * buffer.nbytes / min(seconds)


def limit_seconds(rows: int, length: int, dtype: torch.dtype, *, bytes_s: float, flop_s: float) -> float:
    """Least seconds of one layer's scan. Each state is updated once: 5 operations for each entry of a state and token.

    The caches, which hold the states of few rows and layers, are not counted.
    """
    entries = SPEC.inner_width * SPEC.state_dim
    num_bytes = rows * (2 * 4 * entries + 2 * dtype.itemsize * SPEC.num_channels * SPEC.conv_width)
    return max(num_bytes / bytes_s, 5 * entries * rows * length / flop_s)


def run_layers(clock: Clock, run: Callable[[], object], layers: int, figures: dict[str, float]) -> Done:
    with clock:
        run()
    return Done(layers, figures)


@contextlib.contextmanager
def scan(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        bytes_s, flop_s = update_rate(), 1e9 * measure_ceiling("float32", "cpu").gemm_gflop_s
        print(f"update {bytes_s / 1e9:.1f} GB/s; matrix product {flop_s / 1e9:.0f} GFLOP/s")
        peer = Peer(args.layers, dtype)
        sides = {PEER: peer, **our_backends(peer, dtype)}
        measures = []
        for work in ("scan", "mixer"):
            for name, (rows, length) in WORKS.items():
                hidden_RLD = torch.randn(rows, length, HIDDEN).to(dtype)
                least = limit_seconds(rows, length, dtype, bytes_s=bytes_s, flop_s=flop_s)
                figures = {"limit ms": 1e3 * least} if work == "scan" else {}
                variants: dict[str, Variant] = {
                    who: partial(run_layers, run=getattr(side, work)(hidden_RLD), layers=args.layers, figures=figures)
                    for who, side in sides.items()
                }
                measures.append(Measure(f"{work}, {name}", "layer", variants))
        yield measures


CASES = {
    "scan": Case(
        about="One Mamba-2 layer of mamba2-130m on every scan backend, and what transformers runs on a CPU.\n\n"
        "scan: convolution and scan alone, states read and written. mixer: projections, scan, gated norm; ours with\n"
        "the linears and norm of the same backend. transformers runs causal_conv1d_fn and mamba2_chunk_scan for\n"
        "prompts (chunks of 256, B and C repeated for every head), causal_conv1d_update and\n"
        "mamba2_selective_state_update for decode, with states in a DynamicCache.",
        prepare=scan,
        rounds=9,
        options={"threads": 1, "layers": 4, "dtype": "float32"},
    )
}
