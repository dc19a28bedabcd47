"""Attention of few queries over many keys: the keys cut, the answer the reference's, the bits the row's own."""

from __future__ import annotations

import math

import pytest
import torch
from attention_case import check, on_device, padded
from paged_case import make_case
from test_attention import one_row, run

from megatron_infer.kernels import triton_scratch
from megatron_infer.kernels.kv_rounding import FP8, as_kept
from megatron_infer.kernels.triton.launch import launch, listening

pytestmark = pytest.mark.triton

CHUNK, PROGRAMS = 32, 8
SMALL = {"dtype": torch.float32, "head_dim": 16}
ROWS = [(1, 20), (5, 150), (9, 40), (33, 130)]
"""The first decodes, the third has too few keys to be cut."""


def make_backend(**settings):
    from megatron_infer.kernels.triton.attention import TritonPagedAttention

    given = {
        "num_cores": 3,
        "shared_kib": 227,
        "chunk": CHUNK,
        "slice_chunk": CHUNK,
        "slice_programs": PROGRAMS,
        **settings,
    }
    return TritonPagedAttention(**given)


@pytest.fixture(scope="module")
def backend(device):
    return make_backend()


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 80, "group_size": 3, "sinks": True},
        {"head_dim": 16, "group_size": 2, "dtype": torch.float16, "num_kv_heads": 2, "rotary_dim": 16},
        {"head_dim": 16, "group_size": 2, "window": 80, "sinks": True, "block_size": 24},
    ],
    ids=["padded-dims", "heads", "window"],
)
def test_few_queries_over_many_keys_match_reference(backend, device, settings):
    rows = ROWS[:2] if settings["head_dim"] > 64 else ROWS
    case = make_case(rows, **{"num_decode": 1, "dtype": torch.float32, "num_kv_heads": 1, **settings})
    check(backend, case, device)


def test_a_group_of_several_tiles_is_cut_in_each(backend, device):
    check(backend, make_case([(3, 70)], num_decode=0, num_kv_heads=1, group_size=40, **SMALL), device)


def test_a_padded_step_gives_cut_rows_the_same_bits(backend, device):
    case = make_case(ROWS, num_decode=1, num_kv_heads=1, **SMALL)
    seen: list[str] = []
    with listening(lambda _launch, kernel, *_rest: seen.append(kernel.fn.__name__)):
        want = run(backend, case, device)
    assert seen[-2:] == ["slices_kernel", "merge_slices_kernel"]
    out = run(backend, padded(case, num_decode=2, num_prefill=4, num_tokens=53, max_kv_len=300), device)
    assert torch.equal(torch.cat([out[:1], out[2:49]]), want)
    assert not out[49:].any()


def test_decode_rows_and_padding_alone_are_a_step(backend, device):
    out = check(backend, make_case([(1, 90), (1, 3)], num_decode=2, num_kv_heads=1, num_padding=3, **SMALL), device)
    assert not out[2:].any()


def test_a_cache_of_eight_bits_is_cut_as_well(backend, device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    case = make_case(ROWS[:2], num_decode=1, dtype=torch.float16, head_dim=16, num_kv_heads=1)
    case.kv_cache = as_kept(case.kv_cache, FP8)
    check(backend, case, device)


def test_a_cut_row_has_the_same_bits_alone_among_others_and_on_any_device(backend, device):
    case = make_case(ROWS[1:], num_decode=0, num_kv_heads=1, group_size=2, **SMALL)
    out = run(backend, case, device)
    assert torch.equal(run(make_backend(num_cores=1), case, device), out)
    for i in range(3):
        assert torch.equal(run(backend, one_row(case, i), device), out[case.meta.cu_q[i] : case.meta.cu_q[i + 1]])


def test_partial_sums_of_many_rows_take_turns_in_the_same_memory(backend, device, monkeypatch):
    case = make_case(ROWS, num_decode=1, num_kv_heads=1, group_size=1, **SMALL)
    want = run(backend, case, device)
    monkeypatch.setattr(triton_scratch, "SLICES_BYTES", 2 * 4 * PROGRAMS * 32 * (16 + 2))
    seen = []
    with listening(lambda _launch, kernel, *_rest: seen.append(kernel.fn.__name__)):
        assert torch.equal(run(backend, case, device), want)
    assert seen.count("slices_kernel") == 2


def test_no_launch_where_no_row_can_be_cut(backend, device):
    short = make_case([(1, 40), (3, 2 * CHUNK - 1)], num_decode=1, num_kv_heads=1, **SMALL)
    windowed = make_case([(3, 100)], num_decode=0, num_kv_heads=1, window=20, **SMALL)
    decode = make_case([(1, 100)], num_decode=1, num_kv_heads=1, **SMALL)
    heads = make_case([(3, 100)], num_decode=0, num_kv_heads=PROGRAMS, group_size=1, **SMALL)
    seen: list[str] = []
    with listening(lambda _launch, kernel, *_rest: seen.append(kernel.fn.__name__)):
        for case in (short, windowed, decode, heads):
            run(backend, case, device)
    assert len(seen) > 7 and not any("slices" in name for name in seen)


def test_lse_of_a_cut_row_is_the_log_of_each_heads_sum(backend, device):
    case = on_device(make_case([(6, 100)], num_decode=0, sinks=True, **SMALL), device)
    plain = make_backend(slice_programs=1)
    sums = []
    for one in (backend, plain):
        heads = case.fused.clone().view(6, 2, -1, 16)
        lse = torch.full((6, 2 * (heads.shape[2] - 2)), 7.0, device=device)
        one.plan(case.meta)
        q, k, v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        one.run(q, k, v, case.kv_cache.clone(), layer=1, spec=case.spec, lse_TN=lse)
        sums.append(lse)
    torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-6)


def test_the_items_of_many_slices_are_split_evenly_and_once(device):
    """Rows without queries, with few keys and with too many tiles among them; 20 items a row at most."""
    from share_kernel import share_kernel

    lengths = [(0, 0) if i % 7 == 0 else (1 + 5 * i % 90, 50 + 13 * i % 400) for i in range(300)]
    expected = []
    for row, (num_queries, num_keys) in enumerate(lengths):
        tiles, chunks = math.ceil(num_queries / 8), math.ceil(num_keys / 32)
        most = 20 // tiles if tiles and num_keys >= 64 else 1
        splits = math.ceil(chunks / math.ceil(chunks / most)) if most > 1 else 1
        expected += [(row, item) for item in range(tiles * splits if splits > 1 else 0)]
    num_queries, num_keys = torch.tensor(lengths, dtype=torch.int32, device=device).unbind(1)
    cu_q = torch.nn.functional.pad(num_queries.cumsum(0), (1, 0)).int()
    for programs in (1, 9):
        out = torch.zeros(programs, 3, dtype=torch.int32, device=device)
        lengths_at = cu_q, num_keys.contiguous(), len(lengths)
        launch(share_kernel, (1, programs), *lengths_at, out, QUERIES=8, CHUNK=32, SHORT=32, MOST=20)
        covered = []
        for count, row, item in out.tolist():
            if count > 0:
                assert expected[len(covered)] == (row, item)
                covered += expected[len(covered) : len(covered) + count]
        assert covered == expected
        assert max(out[:, 0]) == math.ceil(len(expected) / programs)
