"""Each attention backend against the reference, over ragged steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_case import check_case, make_case

from megatron_infer.kernels.native.cpu_native import NativePagedAttention
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

DTYPES = [torch.float32, torch.bfloat16]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 45), (1, 255), (1, 256), (1, 257), (1, 700)]
PREFILL = [(33, 33), (2, 2), (7, 40), (16, 16), (5, 300), (130, 130)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_decode_rows_match_reference(make_attention, dtype, head_dim, group_size):
    case = make_case(DECODE, num_decode=len(DECODE), dtype=dtype, head_dim=head_dim, group_size=group_size)
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_prompts_and_chunks_match_reference(make_attention, dtype, head_dim, group_size):
    case = make_case(PREFILL, num_decode=0, dtype=dtype, head_dim=head_dim, group_size=group_size, num_kv_heads=1)
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 24, 200])
def test_mixed_steps_match_reference(make_attention, dtype, block_size, window):
    rows = [(1, 1), (1, 300), (1, 31), (1, 33), (9, 9), (20, 310), (1, 60), (70, 70)]
    case = make_case(rows, num_decode=4, dtype=dtype, block_size=block_size, window=window, rotary_dim=64)
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16])
def test_slices_read_blocks_that_other_slices_of_the_step_fill(make_attention, dtype, block_size):
    size = block_size
    rows = [(1, 2 * size), (3 * size, 3 * size), (1, 3 * size + 1), (5, 2 * size + 5), (1, size + 1), (1, 3 * size)]
    case = make_case(rows, num_decode=1, dtype=dtype, block_size=size, rotary_dim=64)
    table, at = case.meta.block_table, [int(row) for row in case.meta.table_row]
    for row, num_shared in ((2, 3), (3, 2), (4, 1), (5, 2)):
        table[at[row], :num_shared] = table[at[1], :num_shared]
    # The last slice is one token and fills a block whose start an earlier step wrote; a slice of one token reads it.
    table[at[2], 2] = table[at[5], 2]
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [0, 16, 20, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_matches_reference(make_attention, dtype, rotary_dim, interleaved):
    rows = [(1, 5), (1, 18), (6, 6), (3, 20)]
    case = make_case(rows, num_decode=2, dtype=dtype, rotary_dim=rotary_dim, interleaved=interleaved)
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("sinks", [torch.float32, torch.bfloat16])
def test_sinks_match_reference(make_attention, monkeypatch, dtype, window, sinks):
    monkeypatch.setattr("megatron_infer.kernels.torch.cpu_torch.MAX_SCORES", 2000)  # queries in several groups
    rows = [(1, 1), (1, 300), (1, 31), (9, 9), (20, 310), (70, 70)]
    case = make_case(rows, num_decode=3, dtype=dtype, window=window, rotary_dim=64, sinks=True)
    backend = make_attention(dtype)
    given = case.spec.sinks_N.to(sinks)
    case.spec = dataclasses.replace(case.spec, sinks=lambda: given)
    if backend.supports(case.spec, dtype=dtype, block_size=16) is not None:
        assert (dtype, sinks) == (torch.float32, torch.bfloat16) and backend.name == "native"
        return
    check_case(backend, case)
    without = make_case(rows, num_decode=3, dtype=dtype, window=window, rotary_dim=64)
    assert not torch.allclose(case.run(backend)[0], without.run(backend)[0], atol=0.05)
    case.spec.sinks_N.data = case.spec.sinks_N.flip(0)  # at another address
    check_case(backend, case)


@pytest.mark.parametrize("value", [-200.0, 150.0])
def test_a_sink_far_from_the_scores_takes_none_or_all_of_the_weight(make_attention, value):
    case = make_case([(1, 300), (1, 3), (20, 20)], num_decode=2, dtype=torch.float32)
    plain = case.run(backend := make_attention(torch.float32))[0]
    sinks_N = torch.full((6,), value)
    case.spec = dataclasses.replace(case.spec, sinks=lambda: sinks_N)
    want = plain if value < 0 else torch.zeros_like(plain)
    torch.testing.assert_close(case.run(backend)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_scores_and_the_second_of_two_ropes_match_reference(make_attention, monkeypatch, dtype, window, softcap):
    monkeypatch.setattr("megatron_infer.kernels.torch.cpu_torch.MAX_SCORES", 2000)  # queries in several groups
    rows = [(1, 1), (1, 300), (1, 31), (9, 9), (20, 310), (70, 70)]
    form = {"num_decode": 3, "dtype": dtype, "window": window, "rotary_dim": 32, "rotary_at": 16}
    case = make_case(rows, softcap=softcap, **form)
    check_case(make_attention(dtype), case)
    without = make_case(rows, **form)
    differs = not torch.allclose(case.run(ReferenceAttention())[0], without.run(ReferenceAttention())[0], atol=0.05)
    assert differs == (softcap < 1)


def test_a_small_score_is_capped_to_as_many_digits_as_a_large_one(make_attention):
    case = make_case([(1, 40), (40, 40)], num_decode=1, dtype=torch.float32, softcap=1000.0)
    out, want = case.run(make_attention(torch.float32))[0], case.run(ReferenceAttention())[0]
    assert (out - want).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_decode", [0, 1])
def test_a_key_whose_score_is_minus_infinity_counts_nothing(make_attention, dtype, num_decode):
    case = make_case([(1, 40) if num_decode else (40, 40)], num_decode=num_decode, dtype=dtype)
    heads = case.fused.view(len(case.fused), 2, 5, 64)  # three queries, a key and a value
    keys = case.kv_cache[1, 0].flatten(0, 1)
    heads[:, :, :3, 0], heads[:, :, 3, 0], keys[..., 0] = 3e38, 0, 0
    if num_decode:
        keys[int(case.meta.block_table[int(case.meta.table_row[0]), 0]) * 16 + 5, :, 0] = -3e38
    else:
        heads[5, :, 3, 0] = -3e38
    out, _ = case.run(make_attention(dtype))
    want, _ = case.run(ReferenceAttention())
    behind = slice(None) if num_decode else slice(6, None)
    torch.testing.assert_close(out[behind].float(), want[behind].float(), rtol=2e-2, atol=2e-2)
    assert want[behind].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group_size", "rotary", "latent"), [(4, 16, 32), (16, 64, 512), (50, 32, 48)])
def test_latents_match_reference(make_attention, dtype, group_size, rotary, latent):
    rows = [(1, 1), (1, 300), (1, 33), (9, 9), (20, 310), (1, 60), (70, 70)]
    settings = {"num_kv_heads": 1, "head_dim": rotary + latent, "rotary_dim": rotary, "value_start": rotary}
    case = make_case(rows, num_decode=3, dtype=dtype, group_size=group_size, interleaved=True, **settings)
    assert case.kv_cache.shape[1] == 1
    check_case(make_attention(dtype), case)


@pytest.mark.parametrize("group_size", [5, 50])
def test_large_groups_match_reference(make_attention, group_size):
    rows = [(1, 20), (4, 9)]
    case = make_case(rows, num_decode=1, dtype=torch.float32, num_kv_heads=1, group_size=group_size, head_dim=32)
    check_case(make_attention(torch.float32), case)


@pytest.mark.parametrize("rows", [[(1, 40)], [(1, 40), (3, 3)]])
def test_padding_tokens_touch_only_the_dummy_block_and_give_zeros(make_attention, rows):
    case = make_case(rows, num_decode=1, dtype=torch.float32, num_padding=5, rotary_dim=16)
    out, cache = case.run(make_attention(torch.float32))
    plain = make_case(rows, num_decode=1, dtype=torch.float32, rotary_dim=16)
    plain.fused, plain.kv_cache = case.fused[:-5], case.kv_cache
    plain.meta.cos_TR, plain.meta.sin_TR = case.meta.cos_TR[:-5], case.meta.sin_TR[:-5]
    plain.meta.kv_pos_T, plain.meta.block_table = case.meta.kv_pos_T[:-5], case.meta.block_table
    plain.meta.table_row = case.meta.table_row
    want, want_cache = plain.run(make_attention(torch.float32))
    dummy = cache.shape[2] - 1
    assert torch.equal(out[-5:], torch.zeros_like(out[-5:]))
    assert torch.equal(out[:-5], want)
    assert torch.equal(cache[:, :, :dummy], want_cache[:, :, :dummy])


def test_a_rows_answer_does_not_depend_on_the_batch(make_attention):
    """Bit for bit: the same row alone and among others (native); within rounding (torch groups rows)."""
    rows = [(1, 700), (1, 30), (1, 2000), (1, 301)]
    backend = make_attention(torch.float32)
    together = make_case(rows, num_decode=4, dtype=torch.float32)
    out, _ = together.run(backend)
    meta = together.meta
    for i in range(len(rows)):
        alone = make_case(rows, num_decode=4, dtype=torch.float32)
        alone.fused = alone.fused[i : i + 1]
        alone.meta.num_tokens = alone.meta.num_rows = alone.meta.num_decode = 1
        alone.meta.q_len, alone.meta.kv_len = meta.q_len[i : i + 1], meta.kv_len[i : i + 1]
        alone.meta.cu_q, alone.meta.table_row = meta.cu_q[:2], meta.table_row[i : i + 1]
        alone.meta.kv_pos_T = meta.kv_pos_T[i : i + 1]
        single, _ = alone.run(backend)
        if backend.name == "native":
            assert torch.equal(single[0], out[i])
        else:
            torch.testing.assert_close(single[0], out[i], rtol=1e-5, atol=1e-5)


def test_native_attention_gives_the_same_bits_with_any_number_of_threads(native_library):
    rows = [(1, 700), (1, 30), (9, 400), (60, 60)]
    case = make_case(rows, num_decode=2, dtype=torch.bfloat16, rotary_dim=64)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(case.run(NativePagedAttention(native_library, torch.bfloat16))[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_contiguous_and_transposed_inputs_are_both_taken(make_attention):
    case = make_case([(1, 9), (4, 12)], num_decode=1, dtype=torch.float32)
    spec = case.spec
    backend = make_attention(torch.float32)
    want, _ = case.run(backend)
    heads = case.fused.view(-1, spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
    q, k, v = heads[:, :, : spec.group_size], heads[:, :, -2], heads[:, :, -1]
    odd = q.transpose(-1, -2).contiguous().transpose(-1, -2)  # last dim not contiguous
    backend.plan(case.meta)
    out = backend.run(odd, k.contiguous(), v.contiguous(), case.kv_cache.clone(), layer=case.layer, spec=spec)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_steps_match_reference(make_attention, data):
    draw = data.draw
    decode = draw(st.lists(st.integers(1, 600), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=0 if decode else 1, max_size=3))
    rows = [(1, n) for n in decode] + [(q, q + past) for q, past in chunks]
    dtype = draw(st.sampled_from(DTYPES))
    head_dim = draw(st.sampled_from([16, 48, 64, 96]))
    case = make_case(
        rows,
        num_decode=len(decode),
        dtype=dtype,
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.integers(1, 7)),
        head_dim=head_dim,
        block_size=draw(st.sampled_from([16, 32, 128])),
        window=draw(st.one_of(st.none(), st.integers(1, 300))),
        rotary_dim=draw(st.sampled_from([0, 8, head_dim])),
        interleaved=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    check_case(make_attention(dtype), case)
