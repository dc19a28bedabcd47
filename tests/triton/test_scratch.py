"""What a captured step's kernels allocate is what the estimate of its graph counts, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.model_shape import ExpertShape, LatentShape, ModelShape, StateShape
from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.draw_columns import Column, DrawRoom
from megatron_infer.kernels.experts import Addresses, ExpertChoice, ExpertWeights
from megatron_infer.kernels.ssm import DeltaSpec, LayerStates, SsmSpec, SsmWeights
from megatron_infer.kernels.triton_scratch import decode_bytes, draw_bytes, expert_bytes

pytestmark = pytest.mark.triton

META = torch.device("meta")
"""Tensors of it have a shape and no memory."""
MAX_KEYS = 8192
MODEL = ModelShape(
    num_layers=8,
    num_attention_layers=2,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    vocab_size=131_000,
    padded_vocab_size=131_072,
    max_position=None,
    kv_dtype_bytes=2,
    dtype="bfloat16",
    num_parameters=1,
    state=StateShape(
        num_layers=6,
        conv_shape=(128 * 64 + 2 * 8 * 128, 4),
        ssm_shape=(128, 64, 128),
        conv_dtype="bfloat16",
        ssm_dtype="float32",
    ),
    experts=ExpertShape(top_k=6, fc1_width=2 * 1408, fc2_width=1408),
)
MEMORY = GraphMemory(model=MODEL, max_keys=MAX_KEYS)
SHAPES = [GraphShape(64, 0, 64), GraphShape(512, 16, 48), GraphShape(200, 4, 1), GraphShape(16384, 16, 0)]


def given(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


class Taken(TorchDispatchMode):
    """Bytes of every new tensor; no kernel is launched."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.num_bytes = 0
        monkeypatch.setattr("megatron_infer.kernels.triton.launch.Launcher.__call__", lambda *_: None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1].split("_like")[0] in ("empty", "new_empty", "relu", "square", "pow"):
            self.num_bytes += out.nbytes
        return out


def step_of(shape: GraphShape) -> StepMetadata:
    """A padded step's metadata, as `BatchBuilder` makes it."""
    nothing, rows = np.zeros(0, dtype=np.int32), given(shape.num_rows, dtype=torch.int32)
    places = given(shape.num_tokens, dtype=torch.int64)
    return StepMetadata(
        num_tokens=shape.num_tokens, num_rows=shape.num_rows, num_decode=shape.num_decode, q_len=nothing,
        kv_len=nothing, cu_q=nothing, table_row=nothing, num_prompt_queries=nothing, q_len_R=rows, kv_len_R=rows,
        cu_q_R1=given(shape.num_rows + 1, dtype=torch.int32), table_row_R=rows,
        block_table=given(257, MAX_KEYS // 16, dtype=torch.int32), positions_T=places, kv_pos_T=places, cos_TR=None,
        sin_TR=None, max_q_len=shape.prefill_tokens if shape.num_prefill else 1, max_kv_len=MAX_KEYS,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["keys and values", "latents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_takes_for_partial_sums_what_is_estimated(shape, kind, monkeypatch):
    from megatron_infer.kernels.triton.attention import TritonPagedAttention

    backend = TritonPagedAttention(num_cores=132, shared_kib=227, arch=90)
    backend.plan(step_of(shape))
    model, planes, spec = MODEL, 2, AttendSpec(num_kv_heads=8, group_size=4, head_dim=128, scale=0.1)
    if kind == "latents":
        latent = LatentShape(rank=512, num_heads=32, key_dim=192, value_dim=128, rotary_dim=64)
        model, planes = replace(MODEL, num_kv_heads=1, head_dim=576, latent=latent), 1
        spec = AttendSpec(num_kv_heads=1, group_size=32, head_dim=576, scale=0.1, value_start=64)
    cache = given(2, planes, 100, 16, spec.num_kv_heads, spec.head_dim)
    q = given(shape.num_tokens, spec.num_kv_heads, spec.group_size, spec.head_dim)
    k, v = (given(shape.num_tokens, spec.num_kv_heads, spec.head_dim) for _ in "kv")
    with Taken(monkeypatch) as taken:
        out = backend.run(q, k, v, cache, layer=0, spec=spec)
    sizes = {"num_kv": spec.num_kv_heads, "group": spec.group_size, "head_dim": spec.value_dim}
    expected = decode_bytes(shape.num_decode, **sizes, max_keys=MAX_KEYS, is_latent=kind == "latents")
    estimate = GraphMemory(model=model, max_keys=MAX_KEYS)
    assert taken.num_bytes - out.nbytes == expected == estimate._attention(shape)
    assert bool(expected) == bool(shape.num_decode)


@pytest.mark.parametrize("kind", [SsmSpec, DeltaSpec])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_scan_takes_what_is_estimated(shape, kind, monkeypatch):
    from megatron_infer.kernels.triton.scan import TritonScan

    spec = kind(num_heads=128, head_dim=64, state_dim=128, num_groups=8, conv_width=4)
    model = replace(MODEL, state=replace(MODEL.state, is_delta=spec.is_delta))
    estimate = GraphMemory(model=model, max_keys=MAX_KEYS)._scan(shape)
    fp32 = {"dtype": torch.float32}
    heads = {name: given(128, **fp32) for name in ("decay_H", "skip_H", "dt_bias_H")}
    weights = SsmWeights(conv_CW=given(spec.num_channels, 4, **fp32), conv_bias_C=None, **heads)
    states = LayerStates(given(9, spec.num_channels, 4), given(9, 128, 64, 128, **fp32))
    scan, step = TritonScan(), step_of(shape)
    xBC_TC, dt_TX = given(shape.num_tokens, spec.num_channels), given(shape.num_tokens, spec.num_steps)
    with Taken(monkeypatch) as taken:
        scan.plan(step)
        y_TM = scan.run(xBC_TC, dt_TX, states, weights, spec)
    whose = 4 * shape.num_tokens if shape.num_prefill else 0
    assert taken.num_bytes - y_TM.nbytes - xBC_TC.nbytes - whose == estimate
    if shape.num_tokens == 16384:
        assert (528 if spec.is_delta else 312) << 20 <= estimate < (529 if spec.is_delta else 340) << 20


@pytest.mark.parametrize("vocab, num_rows", [(131_000, 64), (4096, 1), (50_257, 3)])
def test_a_captured_draw_takes_what_is_estimated(vocab, num_rows, monkeypatch):
    from megatron_infer.kernels.triton.sampling import TritonSampling

    columns = given(len(Column), 257, dtype=torch.int64)
    row, position = (given(num_rows, dtype=torch.int32) for _ in range(2))
    out, pool = DrawRoom.make(num_rows, META), given(257, MAX_KEYS, dtype=torch.int32)
    logits = given(num_rows, vocab)
    with Taken(monkeypatch) as taken:
        TritonSampling().static_draw(logits, columns, row, position, pool, out)
    assert taken.num_bytes == draw_bytes(num_rows, vocab) > 0


def test_experts_take_no_more_than_is_estimated(monkeypatch):
    from megatron_infer.kernels.triton.experts import TritonExperts

    num_tokens, hidden = 512, MODEL.hidden_size
    fc1, fc2 = [{"weight": given(2 * 1408, hidden), "bias": None}], [{"weight": given(hidden, 1408), "bias": None}]
    weights = ExpertWeights(fc1=fc1, fc2=fc2, first=0, top_k=6, activation=None)
    table = Addresses(given(1, dtype=torch.int64), True)
    monkeypatch.setattr(ExpertWeights, "addresses", lambda *_: table)
    numbers = given(2 * num_tokens * 6 + 8 * 64, dtype=torch.int32)
    choice = ExpertChoice(numbers, num_tokens=num_tokens, top_k=6, num_runs=8, num_experts=64)
    x_TD = given(num_tokens, hidden)
    with Taken(monkeypatch) as taken:
        TritonExperts().add(x_TD, choice, weights, x_TD)
    sizes = {"top_k": 6, "fc1_width": 2 * 1408, "fc2_width": 1408, "hidden": hidden, "element_bytes": 2}
    dead = num_tokens * 6 * 2 * 1408 * 2  # what goes into the activation is gone before the product is made
    assert 0.95 * expert_bytes(num_tokens, **sizes) < taken.num_bytes - dead <= expert_bytes(num_tokens, **sizes)
