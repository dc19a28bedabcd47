"""Latent and sparse attention: long prompts in the latents' space or with full keys, and chosen keys."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from step_rows import step_of

from cases.case import Case, Clock, Done, Measure
from megatron_infer.kernels.base import AttendSpec, IndexQueries, IndexSpec
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativeOps, NativePagedAttention
from megatron_infer.kernels.native.native_latent import NativeLatentAttention
from megatron_infer.kernels.native.native_sparse import NativeChosenKeys
from megatron_infer.kernels.torch.sparse_attention import SparseAttention

BLOCK = 16
SHAPES: dict[str, dict[str, int]] = {
    "moonlight": {"heads": 16, "key": 128, "rotary": 64, "latent": 512, "value": 128},
    "glm-4.7-flash": {"heads": 20, "key": 192, "rotary": 64, "latent": 512, "value": 256},
    "deepseek-v3": {"heads": 128, "key": 128, "rotary": 64, "latent": 512, "value": 128},
}
"""Heads and widths of one layer."""


class Layer:
    """A layer's attention over a cache of random numbers, with what surrounds it in the latents' space."""

    def __init__(self, rows: list[tuple[int, int]], num_decode: int, args: argparse.Namespace, index: int = 0) -> None:
        """rows: (queries, keys). index: width of index keys; 0: none."""
        self.dtype, shape = getattr(torch, args.dtype), SHAPES[args.shape]
        self.heads, self.key, rotary = shape["heads"], shape["key"], shape["rotary"]
        width, blocks = rotary + shape["latent"] + index, [-(-keys // BLOCK) for _, keys in rows]
        table = torch.randperm(sum(blocks)).int()
        wide = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for row, part in enumerate(table.split(blocks)):
            wide[row, : len(part)] = part
        self.step = step_of(rows, num_decode=num_decode, table_row=range(len(rows)), block_table=wide, block_size=BLOCK)
        angle = torch.rand(self.step.num_tokens, rotary)
        self.step.cos_TR, self.step.sin_TR = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        self.spec = AttendSpec(
            num_kv_heads=1,
            group_size=self.heads,
            head_dim=width,
            scale=(self.key + rotary) ** -0.5,
            rotary_dim=rotary,
            rotary_interleaved=True,
            value_start=rotary,
        )
        self.cache = self.randn(1, 1, sum(blocks), BLOCK, 1, width)
        self.weight = self.randn(self.heads, self.key + shape["value"], shape["latent"])
        self.q = self.randn(self.step.num_tokens, self.heads, self.key + rotary)
        self.kept = self.randn(self.step.num_tokens, 1, width)
        self.ops = NativeOps(native_build.load(), self.dtype)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).div(8).to(self.dtype)

    def into(self) -> torch.Tensor:
        return self.ops.into_latent(self.q, self.weight[:, : self.key]).unsqueeze(1)

    def out(self, mixed_TX: torch.Tensor) -> torch.Tensor:
        return self.ops.out_of_latent(mixed_TX.unflatten(1, (self.heads, -1)), self.weight[:, self.key :])


def absorbed(clock: Clock, layer: Layer, backend: NativePagedAttention) -> Done:
    backend.plan(layer.step)
    rotary = layer.spec.rotary_dim
    with clock:
        given = layer.into(), layer.kept, layer.kept[..., rotary:]
        layer.out(backend.run(*given, layer.cache, layer=0, spec=layer.spec))
    return Done(1)


def expanded(clock: Clock, layer: Layer, backend: NativeLatentAttention) -> Done:
    backend.plan(layer.step)
    rotary = layer.spec.rotary_dim
    with clock:
        q = layer.q.new_empty(len(layer.q), 1, layer.heads, layer.spec.head_dim)
        backend.run(q, layer.kept, layer.kept[..., rotary:], layer.cache, layer=0, spec=layer.spec)
        out = layer.q.new_empty(len(layer.q), layer.heads * (layer.weight.shape[1] - layer.key))
        backend.run_expanded(layer.q, layer.weight.flatten(0, 1), out, layer.cache, layer=0, spec=layer.spec)
    return Done(1)


@contextlib.contextmanager
def prompts(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    library, measures = native_build.load(), []
    for text in args.chunks.split():
        new, cached = map(int, text.split("+"))
        layer = Layer([(new, new + cached)], 0, args)
        backends = (
            NativePagedAttention(library, layer.dtype),
            NativeLatentAttention(library, layer.dtype, expands_from=1),
        )
        variants = {
            "absorbed": partial(absorbed, layer=layer, backend=backends[0]),
            "expanded": partial(expanded, layer=layer, backend=backends[1]),
        }
        measures.append(Measure(f"{new:,} prompt tokens after {cached:,} cached", "layer", variants))
    yield measures


def choose(clock: Clock, layer: Layer, backend: SparseAttention, spec: AttendSpec, index: IndexQueries) -> Done:
    backend.plan(layer.step)
    q, kept = layer.into(), layer.kept.clone()
    with clock:
        backend.run_sparse(q, kept, layer.cache, layer=0, spec=spec, index=index)
    return Done(1)


@contextlib.contextmanager
def chosen(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    library, measures = native_build.load(), []
    indexer = IndexSpec(num_heads=64, dim=128, top_k=args.top_k, rotary_dim=64, rotary_interleaved=False)
    for what, rows, num_decode in (
        (f"decode, 4 rows of {args.context:,}", [(1, args.context)] * 4, 4),
        (f"64 prompt tokens after {args.context:,}", [(64, args.context + 64)], 0),
    ):
        layer = Layer(rows, num_decode, args, index=indexer.dim)
        fields = {name: getattr(layer.spec, name) for name in layer.spec.__dataclass_fields__}
        spec = AttendSpec(**fields | {"index": indexer})
        native = NativePagedAttention(library, layer.dtype)
        index = IndexQueries(layer.randn(layer.step.num_tokens, 64, 128), layer.randn(layer.step.num_tokens, 64))
        keys: dict[str, Any] = {"torch": None, "native": NativeChosenKeys(library, native, layer.dtype)}
        variants = {
            name: partial(
                choose,
                layer=layer,
                backend=SparseAttention(native, top_k=args.top_k, chosen=one),
                spec=spec,
                index=index,
            )
            for name, one in keys.items()
        }
        measures.append(Measure(what, "layer", variants))
    yield measures


COMMON = {"shape": "moonlight", "dtype": "bfloat16", "threads": 1}
CASES = {
    "latent-prompts": Case(
        about="A layer's latent attention of a prompt's chunk: in the latents' space, and with full keys and values.\n"
        "--chunks: prompt tokens + cached positions before them. --shape: " + ", ".join(SHAPES),
        prepare=prompts,
        rounds=5,
        options=COMMON | {"chunks": "128+0 256+0 512+0 1024+0 2048+0 4096+0 128+2048 256+2048 512+2048 1024+2048"},
    ),
    "chosen-keys": Case(
        about="A layer's sparse attention: the choice of keys and attention to them, in torch and native.",
        prepare=chosen,
        rounds=5,
        options=COMMON | {"top_k": 2048, "context": 4096},
    ),
}
