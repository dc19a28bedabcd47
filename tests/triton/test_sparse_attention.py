"""Sparse attention in Triton against its definition, however sequences are cut into steps."""

from __future__ import annotations

import pytest
import torch
from launches import kernels_launched
from sparse_case import BLOCK, CHUNKS, LENGTHS, TOP_K, WHOLE, Sequences, run_steps, sparse_spec

pytestmark = pytest.mark.triton


@pytest.fixture
def backend(device):
    from megatron_infer.kernels.triton.attention import TritonPagedAttention
    from megatron_infer.kernels.triton.sparse_attention import TritonSparseAttention

    return TritonSparseAttention(TritonPagedAttention(num_cores=2, shared_kib=227, chunk=16))


@pytest.mark.parametrize("cuts", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    "index", [{}, {"rotary_interleaved": False, "relu": False}], ids=["interleaved", "halves, no relu"]
)
def test_queries_attend_to_the_keys_that_the_indexer_chooses(backend, device, index, cuts):
    sequences = Sequences(sparse_spec(**index))
    assert backend.supports(sequences.spec, dtype=torch.float32, block_size=BLOCK) is None
    for which, out in enumerate(run_steps(backend, sequences, cuts, shared=True, device=device)):
        torch.testing.assert_close(out.double(), sequences.wanted(which)[0], rtol=1e-5, atol=1e-5)


def test_scores_that_do_not_fit_at_once_are_made_in_parts(backend, device, monkeypatch):
    from megatron_infer.kernels.triton import sparse_attention

    sequences = Sequences(sparse_spec())
    want = run_steps(backend, sequences, WHOLE, device=device)
    monkeypatch.setattr(sparse_attention, "index_queries", lambda max_keys: 5)
    with kernels_launched() as launched:
        got = run_steps(backend, sequences, WHOLE, device=device)
    assert launched.count("index_scores") == -(-(sum(LENGTHS) + 2) // 5)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_of_equal_scores_the_earlier_key_is_chosen(backend, device):
    """Zeros of either sign are equal."""
    sequences = Sequences(sparse_spec())
    signs = torch.tensor([1.0, -1.0]).repeat(sequences.spec.index.num_heads // 2)
    sequences.weights = [torch.zeros_like(part) * signs for part in sequences.weights]
    first = torch.zeros(LENGTHS[0], LENGTHS[0], dtype=torch.bool)
    first[:, :TOP_K] = True
    out = run_steps(backend, sequences, CHUNKS, device=device)[0]
    torch.testing.assert_close(out.double(), sequences.wanted(0, first.tril())[0], rtol=1e-5, atol=1e-5)


def test_keys_and_index_keys_of_eight_bits_give_the_answer_of_torch(backend, device):
    from megatron_infer.kernels.torch.cpu_torch import TorchPagedAttention
    from megatron_infer.kernels.torch.sparse_attention import SparseAttention

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    sequences, kept = Sequences(sparse_spec()), {"kv_dtype": torch.float8_e4m3fn}
    want = run_steps(SparseAttention(TorchPagedAttention(), top_k=TOP_K), sequences, CHUNKS, **kept)
    for one, other in zip(run_steps(backend, sequences, CHUNKS, **kept, device=device), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_steps_of_few_keys_attend_to_all_of_them_without_an_indexer(backend, device):
    sequences = Sequences(sparse_spec(top_k=max(LENGTHS)))
    with kernels_launched() as launched:
        outs = run_steps(backend, sequences, CHUNKS, device=device)
    assert "prefill_kernel" in launched and "index_scores" not in launched
    for which, out in enumerate(outs):
        whole = torch.ones(LENGTHS[which], LENGTHS[which], dtype=torch.bool).tril()
        torch.testing.assert_close(out.double(), sequences.wanted(which, whole)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [TOP_K, max(LENGTHS)])
def test_the_choice_of_a_step_is_ascending_positions_and_then_minus_one(backend, device, top_k):
    sequences = Sequences(sparse_spec(top_k=top_k))
    run_steps(backend, sequences, WHOLE, device=device)
    found = backend.choice_of_step(max(LENGTHS)).cpu()
    assert found.dtype is torch.int32 and found.shape[1] == top_k
    for which, rows in enumerate(found.split([*LENGTHS, 2])[: len(LENGTHS)]):
        for row, chosen in zip(rows.tolist(), sequences.wanted(which)[1], strict=True):
            keys = chosen.nonzero()[:, 0].tolist()
            assert row == keys + [-1] * (top_k - len(keys))
    assert backend.choice_of_step(7).shape[1] == 7
