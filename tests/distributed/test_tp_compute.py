"""Layers split over tensor-parallel ranks give the logits of one process, and call no module of megatron-core."""

from __future__ import annotations

import functools
from unittest import mock

import paged_step
import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import gathered, new_groups, run_on_ranks
from test_adopt_tensor_parallel import fill_vectors, logits_of_schedule

from megatron_infer.errors import AdoptionError, ModelError
from megatron_infer.kernels.packing import PackedLinears, unavailable
from megatron_infer.models.adopt import adopt
from megatron_infer.models.mcore_compat import ColumnParallelLinear, RowParallelLinear
from megatron_infer.models.tp_collectives import Reducer
from megatron_infer.testing.tiny import tiny_gpt

SHARED_KV = {
    "one_kv_head": {"num_query_groups": 1, "qk_layernorm": True},
    "one_kv_head_biases": {
        "num_query_groups": 1,
        "num_attention_heads": 8,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    },
}
TWO_RANKS = SHARED_KV | {
    "whole_kv_heads": {"add_qkv_bias": True, "share_embeddings_and_output_weights": True},
    "bf16": {"params_dtype": torch.bfloat16},
}
FOUR_RANKS = {"two_kv_heads": {"num_attention_heads": 8}}
"""Ranks 0 and 1 share the first kv head, 2 and 3 the second."""


def model_of(settings, rank=0, size=1):
    """The same weights for any number of ranks."""
    model = tiny_gpt(**settings, tensor_model_parallel_size=size, randomize=False)
    fill_vectors(model, rank, size)
    return model


def expected_of(cases, folder):
    for name, settings in cases.items():
        torch.save(logits_of_schedule(adopt(model_of(settings))), folder / f"{name}.pt")


def compare(cases, rank, size, folder):
    new_groups(tensor_model_parallel_size=size)
    for name, settings in cases.items():
        adopted = adopt(model_of(settings, rank, size))
        with mock.patch.multiple(torch.nn.Module, __call__=_no_module):
            logits = logits_of_schedule(adopted)
            again = logits_of_schedule(adopted)
        limit = 1e-5 if "bf16" not in name else 3e-2
        for got, same, want in zip(logits, again, torch.load(folder / f"{name}.pt"), strict=True):
            assert torch.equal(got, same), f"{name}: other bits in the second run"
            torch.testing.assert_close(got, want.chunk(size, dim=1)[rank], atol=limit, rtol=0)
        assert adopted.tp_group.size() == size
        check_packable(adopted)


def _no_module(self, *args, **kwargs):
    raise AssertionError(f"{type(self).__name__} was called as a module")


def check_packable(adopted):
    """Every linear's part of the weight, and the output layer's, can be prepacked."""
    reason = unavailable(next(adopted.live.parameters()).dtype)
    packed = PackedLinears(reason=reason)
    packed.pack(adopted.packable_weights())
    if reason is not None:  # oneDNN on a CPU without products of bfloat16
        return
    linears = sum(isinstance(m, (ColumnParallelLinear, RowParallelLinear)) for m in adopted.live.decoder.modules())
    assert packed.num_weights == linears + 1


def on_two_ranks(rank, size, folder):
    compare(TWO_RANKS, rank, size, folder)
    a_trainers_sequence_parallelism_does_not_matter(rank, size, folder)
    model = tiny_gpt(tensor_model_parallel_size=size)
    model.decoder.layers[1].mlp.linear_fc1.gather_output = True
    with pytest.raises(AdoptionError, match=r"linear_fc1: gathers its output"):
        adopt(model)


def a_trainers_sequence_parallelism_does_not_matter(rank, size, folder):
    compare({"whole_kv_heads": TWO_RANKS["whole_kv_heads"] | {"sequence_parallel": True}}, rank, size, folder)
    model = tiny_gpt(tensor_model_parallel_size=size, sequence_parallel=True)
    cache = paged_step.Cache(adopt(model))
    step = cache.step([(0, [1, 2, 3, 4])])
    with torch.inference_mode(), pytest.raises(ModelError, match=r"sequence_parallel=True.*turn it off around"):
        model.decoder.layers[0](hidden_states=torch.zeros(2, 1, 64), attention_mask=None, inference_context=step)


def on_four_ranks(rank, size, folder):
    compare(FOUR_RANKS, rank, size, folder)
    sums_do_not_depend_on_their_place(rank, size)


def sums_do_not_depend_on_their_place(rank, size):
    reducer = Reducer.of(torch.distributed.group.WORLD)
    assert Reducer.of(torch.distributed.group.WORLD) is reducer, "layers share its memory"
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(rank)
        mine = torch.randn(97, 1001, generator=generator).to(dtype)
        whole = reducer.all_reduce(mine.clone())  # large: in shares
        for rows in (slice(0, 1), slice(3, 5), slice(96, 97)):
            few = reducer.all_reduce(mine[rows].clone())  # small: in one round
            assert torch.equal(few, whole[rows])
        everyones = gathered(mine.view(-1, 1)).float()
        in_order = everyones[:, 0].clone()
        for other in range(1, size):
            in_order += everyones[:, other]
        assert torch.equal(whole.view(-1), in_order.to(dtype))


@pytest.mark.timeout(240)
def test_two_ranks_give_the_logits_of_one(tmp_path):
    expected_of(TWO_RANKS, tmp_path)
    run_on_ranks(on_two_ranks, 2, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_four_ranks_share_two_kv_heads(tmp_path):
    expected_of(FOUR_RANKS, tmp_path)
    run_on_ranks(on_four_ranks, 4, tmp_path)
