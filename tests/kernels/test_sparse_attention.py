"""Attention to the keys that an indexer chooses, however a sequence is cut into steps, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sparse_case import (
    BLOCK,
    CHUNKS,
    LATENT,
    LENGTHS,
    ROTARY,
    TOP_K,
    WHOLE,
    Sequences,
    run_steps,
    sparse_spec,
)
from step_rows import step_of

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.base import NO_INDEXER
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import NativePagedAttention
from megatron_infer.kernels.native.native_sparse import NativeChosenKeys
from megatron_infer.kernels.select import choose, choose_exact
from megatron_infer.kernels.torch.cpu_torch import TorchPagedAttention
from megatron_infer.kernels.torch.sparse_attention import (
    SparseAttention,
    SparseQueries,
    SparseRow,
    TorchChosenKeys,
    dense_spec,
)
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention


def _native():
    try:
        return NativePagedAttention(native_build.load(), torch.float32)
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))


DENSE = {"reference": ReferenceAttention, "torch": TorchPagedAttention, "native": _native}


def _sparse(dense: str) -> SparseAttention:
    if dense == "native":
        return _native_sparse(TOP_K)
    return SparseAttention(DENSE[dense](), top_k=TOP_K)


def _native_sparse(top_k: int) -> SparseAttention:
    native = _native()
    chosen = NativeChosenKeys(native_build.load(), native, torch.float32)
    return SparseAttention(native, top_k=top_k, chosen=chosen)


@pytest.mark.parametrize("cuts", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    "index", [{}, {"rotary_interleaved": False}, {"relu": False}], ids=["interleaved", "halves", "no_relu"]
)
@pytest.mark.parametrize("dense", DENSE)
def test_queries_attend_to_the_keys_that_the_indexer_chooses(dense, index, cuts):
    sequences = Sequences(sparse_spec(**index))
    backend = _sparse(dense)
    assert backend.supports(sequences.spec, dtype=torch.float32, block_size=BLOCK) is None
    for which, out in enumerate(run_steps(backend, sequences, cuts)):
        torch.testing.assert_close(out.double(), sequences.wanted(which)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", DENSE)
def test_the_choice_matters(dense):
    """The tolerance of the test above sees one key that is chosen wrongly."""
    sequences = Sequences(sparse_spec())
    right, chosen = sequences.wanted(0)
    wrong = chosen.clone()
    wrong[-1, chosen[-1].nonzero()[0]], wrong[-1, (~chosen[-1]).nonzero()[0]] = False, True
    assert (sequences.wanted(0, wrong)[0] - right)[-1].abs().max() > 1e-3


def test_a_layer_attends_to_the_choice_of_the_layer_before():
    sequences = Sequences(sparse_spec())
    for which, out in enumerate(
        run_steps(SparseAttention(TorchPagedAttention(), top_k=TOP_K), sequences, CHUNKS, shared=True)
    ):
        torch.testing.assert_close(out.double(), sequences.wanted(which)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [TOP_K, 17], ids=["one partition", "not a vector"])
def test_the_native_kernel_gives_a_query_the_same_bits_alone_and_among_others(top_k):
    sequences = Sequences(sparse_spec(top_k=top_k))
    whole, chunks = (run_steps(_native_sparse(top_k), sequences, cuts) for cuts in (WHOLE, CHUNKS))
    for which, (one, other) in enumerate(zip(whole, chunks, strict=True)):
        assert torch.equal(one[top_k:], other[top_k:])
        torch.testing.assert_close(one.double(), sequences.wanted(which)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_kernel_merges_many_chosen_keys_of_many_heads(native_library, dtype):
    """More keys than a partition, more heads than an item, in the widths of DeepSeek-V3.2."""
    generator = torch.Generator().manual_seed(2)
    heads, rotary, latent, index, size, kept, width = 20, 64, 512, 128, 16, 700, 600
    spec = dense_spec(
        replace(
            sparse_spec(dim=index), group_size=heads, head_dim=rotary + latent + index, scale=0.05, value_start=rotary
        )
    )
    pages = torch.randn(60, size, 1, spec.head_dim, generator=generator).to(dtype)
    table = torch.randperm(60, generator=generator)[None, :44].int()
    q = torch.randn(3, heads, spec.query_dim, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(kept, generator=generator)[:width].sort().values for _ in range(3)]).int()
    native = NativeChosenKeys(native_library, NativePagedAttention(native_library, dtype), dtype)
    meta = step_of([(3, kept)], table_row=[0], block_table=table, block_size=size, dummy_block=0)
    queries = SparseQueries(meta, [SparseRow(first=0, stop=3, kv_len=kept, table=table[0])])
    found = native.attend(q, chosen, queries, pages, spec=spec)
    keys = pages[table[0].long()].flatten(0, 2)[chosen.long()].double()
    weights = (q.double() @ keys[..., : spec.query_dim].transpose(1, 2) * spec.scale).softmax(-1)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        found.double(), weights @ keys[..., rotary : spec.query_dim], rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_choice_is_that_of_torch(native_library, dtype):
    """More keys than a partition, heads that are no multiple of those at once, and a NaN, which is highest."""
    generator = torch.Generator().manual_seed(3)
    heads, dim, size, kept, queries_of_row = 7, 48, 16, 700, 5
    table = torch.randperm(60, generator=generator)[None, :44].int()
    pages = torch.randn(60, size, 1, 32 + dim, generator=generator).to(dtype)
    pages[table[0, 3], 5, 0, -1] = float("nan")
    meta = step_of([(queries_of_row, kept)], table_row=[0], block_table=table, block_size=size, dummy_block=0)
    queries = SparseQueries(meta, [SparseRow(first=0, stop=queries_of_row, kv_len=kept, table=table[0])])
    q = torch.randn(queries_of_row, heads, dim, generator=generator).to(dtype)
    weights = torch.randn(queries_of_row, heads, generator=generator).to(dtype)
    native = NativeChosenKeys(native_library, NativePagedAttention(native_library, dtype), dtype)
    for relu in (True, False):
        indexer = sparse_spec(num_heads=heads, dim=dim, top_k=300, relu=relu).index
        found, wanted = (one.choose(q, weights, queries, pages, indexer) for one in (native, TorchChosenKeys()))
        assert torch.equal(found, wanted) and (found == 3 * size + 5).any(1).all()


def test_keys_and_index_keys_of_eight_bits_give_the_same_answer_in_chunks_and_whole():
    sequences = Sequences(sparse_spec())
    whole, chunks = (
        run_steps(SparseAttention(TorchPagedAttention(), top_k=TOP_K), sequences, cuts, kv_dtype=torch.float8_e4m3fn)
        for cuts in (WHOLE, CHUNKS)
    )
    for one, other in zip(whole, chunks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_earlier_key_is_chosen():
    sequences = Sequences(sparse_spec())
    sequences.weights = [torch.zeros_like(part) for part in sequences.weights]
    out = run_steps(SparseAttention(TorchPagedAttention(), top_k=TOP_K), sequences, CHUNKS)[0]
    first = torch.zeros(LENGTHS[0], LENGTHS[0], dtype=torch.bool)
    first[:, :TOP_K] = True
    torch.testing.assert_close(out.double(), sequences.wanted(0, first.tril())[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", DENSE)
def test_a_backend_without_an_indexer_refuses_the_layer(dense):
    assert DENSE[dense]().supports(sparse_spec(), dtype=torch.float32, block_size=BLOCK) == NO_INDEXER


def test_index_keys_of_other_widths_are_chosen_in_torch(native_library):
    spec = replace(sparse_spec(dim=24, rotary_dim=8), head_dim=ROTARY + LATENT + 24)
    assert choose("cpu", torch.float32, specs=[spec], block_size=16).attention.name == "torch, sparse"


def test_exact_kernels_and_backends_without_an_indexer_are_refused_by_name():
    made = {"specs": [sparse_spec()], "block_size": 16}
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
    with pytest.raises(ConfigError, match=f"exact attention {NO_INDEXER}"):
        choose_exact("cpu", torch.float32, **made)
    assert choose("cpu", torch.float32, **made).attention.name == "native, sparse"
    assert choose("cpu", torch.float32, attention="torch", **made).attention.name == "torch, sparse"


def test_layers_that_choose_different_numbers_of_keys_are_refused():
    backend = SparseAttention(TorchPagedAttention(), top_k=TOP_K)
    other = replace(sparse_spec(), index=replace(sparse_spec().index, top_k=5))
    assert "chooses 11 keys in every layer, one asks for 5" in backend.supports(
        other, dtype=torch.float32, block_size=BLOCK
    )
