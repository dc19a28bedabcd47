"""Triton's paged attention against the reference over ragged steps; the same bits however a step is made up."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math

import pytest
import torch
from attention_case import CHUNK, check, make_backend, one_row, padded, run
from launches import captured, kernels_launched
from paged_case import Case, make_case

from megatron_infer.kernels.triton.launch import launch, listening

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def backend(device):
    return make_backend()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 112, 256])
def test_decode_rows_match_reference(backend, device, dtype, head_dim):
    rows = [(1, 1), (1, 17), (1, CHUNK), (1, CHUNK + 1), (1, 3 * CHUNK - 1)]
    case = make_case(rows, num_decode=5, dtype=dtype, head_dim=head_dim, num_kv_heads=1, group_size=3)
    check(backend, case, device=device)


def test_steps_of_short_decode_rows_take_the_kernel_that_those_of_long_ones_do(backend, device):
    """Else the first of the others waits for a compiler: what is warmed up has the longest rows there can be."""
    seen = []

    def note(_launch, kernel, _grid, args, _options):
        if kernel.fn.__name__ == "decode_kernel":
            seen.append([arg.dtype for arg in args if isinstance(arg, torch.Tensor)])

    with listening(note):
        for length in (CHUNK, CHUNK + 1):
            run(backend, make_case([(1, length)], num_decode=1, dtype=torch.float16, head_dim=16), device)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_draft_between_two_steps_leaves_what_a_layer_is_launched_with(device):
    """An MTP layer runs as layer 0 of another spec and another cache; what is new searches for its kernels again."""
    backend = make_backend()
    cases = [make_case([(1, 20)], num_decode=1, dtype=torch.float32, head_dim=dim) for dim in (16, 32)]
    model, draft = (case.on(device) for case in cases)
    found, held = [], []
    for case in (model, draft, model):
        held.append(case.run(backend))  # with its cache
        found.append({layer: kind.decode for layer, kind in backend._kinds.items()})
    assert found[0] and found[2] == found[0] != found[1]
    assert len(backend._planes) == 3
    del held, case
    gc.collect()
    assert not backend._planes


@pytest.mark.parametrize("head_dim", [16, 64, 96, 256])
def test_prompts_and_chunks_match_reference(backend, device, dtype, head_dim):
    rows = [(33, 33), (2, 2), (7, 40), (16, 16), (5, 130), (70, 70)]
    case = make_case(rows, num_decode=0, dtype=dtype, head_dim=head_dim, num_kv_heads=1, group_size=2)
    check(backend, case, device=device)


@pytest.mark.parametrize("window", [None, 1, 24, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_mixed_steps_match_reference(backend, device, dtype, window, sinks):
    rows = [(1, 1), (1, 100), (1, 31), (1, 33), (9, 9), (20, 90), (1, 60)]
    case = make_case(rows, num_decode=4, dtype=dtype, window=window, rotary_dim=32, head_dim=32, sinks=sinks)
    check(backend, case, device=device)


@pytest.mark.parametrize(("softcap", "sinks"), [(0.5, True), (30.0, False)])
def test_capped_scores_and_the_second_of_two_ropes_match_reference(backend, device, softcap, sinks):
    rows = [(1, 1), (1, 100), (1, 31), (9, 9), (20, 90), (1, 60)]
    form = {"num_decode": 3, "window": 40, "rotary_dim": 16, "rotary_at": 8, "head_dim": 32, "sinks": sinks}
    check(backend, make_case(rows, dtype=torch.float32, softcap=softcap, **form), device=device)


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 256])
def test_blocks_of_any_size_match_reference(backend, device, block_size):
    rows = [(1, 70), (1, 64), (9, 75), (30, 30)]
    case = make_case(rows, num_decode=2, dtype=torch.float32, block_size=block_size, head_dim=32, window=50)
    check(backend, case, device=device)
    check(
        backend, make_case(rows, num_decode=2, dtype=torch.float16, block_size=block_size, head_dim=32), device=device
    )


@pytest.mark.parametrize("group_size", [1, 5, 16, 70])
def test_groups_of_any_size_match_reference(backend, device, group_size):
    rows = [(1, 40), (3, 9)]
    case = make_case(
        rows, num_decode=1, dtype=torch.float32, num_kv_heads=1, group_size=group_size, head_dim=32, sinks=True
    )
    check(backend, case, device=device)


def latents(rows, *, num_decode, dtype, group_size=4, rotary=16, latent=32, **more) -> Case:
    """Queries of latent attention: the cache has one plane."""
    sizes = {"num_kv_heads": 1, "head_dim": rotary + latent, "rotary_dim": rotary, "value_start": rotary}
    return make_case(rows, num_decode=num_decode, dtype=dtype, group_size=group_size, interleaved=True, **sizes, **more)


@pytest.mark.parametrize("sizes", [(4, 16, 32), (20, 64, 512), (50, 8, 48), (3, 8, 24)])
def test_latents_match_reference(backend, device, dtype, sizes):
    group, rotary, latent = sizes
    rows = [(1, 1), (1, 40), (9, 20)] if latent > 100 else [(1, 1), (1, 100), (1, 33), (9, 9), (20, 90), (1, 60)]
    sizes = {"group_size": group, "rotary": rotary, "latent": latent}
    case = latents(rows, num_decode=2, dtype=dtype, block_size=24 if group == 50 else 16, **sizes)
    check(backend, case, device=device)


def test_latents_have_the_same_bits_padded_alone_and_with_any_number_of_programs(backend, device):
    rows = [(1, 70), (1, 12), (9, 50), (20, 20)]
    case = latents(rows, num_decode=2, dtype=torch.float32)
    plain = run(backend, case, device)
    out = check(backend, padded(case, num_decode=4, num_prefill=5, num_tokens=60, max_kv_len=300), device=device)
    assert torch.equal(torch.cat([out[:2], out[4 : 4 + 29]]), plain) and not out[4 + 29 :].any()
    assert torch.equal(run(make_backend(num_cores=64), case, device), plain)
    for i in range(len(rows)):
        assert torch.equal(run(backend, one_row(case, i), device), plain[case.meta.cu_q[i] : case.meta.cu_q[i + 1]])


@pytest.mark.parametrize("rotary_dim", [0, 16, 20, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_matches_reference(backend, device, dtype, rotary_dim, interleaved):
    rows = [(1, 5), (6, 6), (3, 20)]
    case = make_case(rows, num_decode=1, dtype=dtype, rotary_dim=rotary_dim, interleaved=interleaved)
    check(backend, case, device=device)


def test_slices_read_blocks_that_other_slices_of_the_step_fill(backend, device):
    rows = [(1, 32), (48, 48), (1, 49), (5, 37), (1, 17)]
    case = make_case(rows, num_decode=1, dtype=torch.float32, rotary_dim=64)
    table, at = case.meta.block_table, [int(row) for row in case.meta.table_row]
    for row, num_shared in ((2, 3), (3, 2), (4, 1)):
        table[at[row], :num_shared] = table[at[1], :num_shared]
    check(backend, case, device=device)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
@pytest.mark.parametrize("window", [None, CHUNK + 5])
def test_split_boundaries_match_reference(backend, device, length, window):
    case = make_case([(1, length)], num_decode=1, dtype=torch.float32, head_dim=32, window=window, sinks=True)
    check(backend, case, device=device)


def test_a_long_row_takes_larger_splits_not_more(device):
    from megatron_infer.kernels.triton.attention_decode import decode_tiles
    from megatron_infer.kernels.triton.attention_tiles import Layer

    backend = make_backend(chunk=16)
    case = make_case([(1, 16 * 16 + 1)], num_decode=1, dtype=torch.float32, num_kv_heads=16, group_size=1, head_dim=16)
    assert decode_tiles(Layer(16, 1, 16, 16, 4), 16).max_splits == 16
    check(backend, case, device=device)


@pytest.mark.parametrize("window", [None, 300])
def test_a_short_row_takes_smaller_splits(device, window):
    """And one of up to a chunk none. Several programs share them."""
    from megatron_infer.kernels.triton.attention_decode import decode_tiles
    from megatron_infer.kernels.triton.attention_tiles import Layer

    tiles = decode_tiles(Layer(2, 2, 64, 16, 4))
    assert (tiles.chunk, tiles.short) == (256, 64)
    rows = [(1, 256), (1, 257), (1, 700), (1, 2048), (1, 2049)]
    case = make_case(
        rows, num_decode=5, dtype=torch.float32, num_kv_heads=2, group_size=2, head_dim=64, window=window, sinks=True
    )
    out = check(make_backend(chunk=256, num_cores=4), case, device=device)
    short = make_case(rows[:1], num_decode=1, dtype=torch.float32, head_dim=64, num_kv_heads=2, group_size=2)
    with kernels_launched() as launched:
        run(make_backend(chunk=256), short, device)
    assert out.shape[0] == 5 and launched.count("decode_kernel") == 1 and "merge_kernel" not in launched


@pytest.mark.parametrize("short", [4, 16])
def test_the_splits_of_many_rows_are_split_evenly_and_once(device, short):
    """More rows than are looked at together; splits of 16 keys, or of fewer up to 128 keys, at most 4 a row."""
    from probe_kernels import share_kernel

    def num_splits(length):
        chunks = math.ceil(length / (short if length <= 8 * 16 else 16))
        return 1 if length <= 16 else math.ceil(chunks / math.ceil(chunks / 4))

    lengths = [7 * i % 190 for i in range(600)]
    splits = [num_splits(length) for length in lengths]
    expected = [(row, split) for row, n in enumerate(splits) for split in range(n)]
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for programs in (1, 7, 40):
        out = torch.zeros(programs, 3, dtype=torch.int32, device=device)
        launch(share_kernel, (1, programs), kv_len, len(lengths), out, CHUNK=16, SHORT=short, MAX_SPLITS=4)
        covered = []
        for count, row, split in out.tolist():
            if count > 0:
                assert expected[len(covered)] == (row, split)
                covered += expected[len(covered) : len(covered) + count]
        assert covered == expected
        assert max(out[:, 0]) == -(-len(expected) // programs)


def test_a_padded_step_gives_the_same_bits_and_zeros_for_padding(backend, device, dtype):
    rows = [(1, 70), (1, 12), (9, 50), (20, 20)]
    case = make_case(rows, num_decode=2, dtype=dtype, rotary_dim=32, head_dim=32, num_kv_heads=1)
    plain = run(backend, case, device)
    out = check(backend, padded(case, num_decode=4, num_prefill=5, num_tokens=60, max_kv_len=300), device=device)
    assert torch.equal(torch.cat([out[:2], out[4 : 4 + 29]]), plain)
    assert not out[4 + 29 :].any() and len(out) == 60


def test_a_step_padded_with_tokens_alone_gives_zeros_for_them(backend, device):
    case = make_case([(1, 40), (1, 3)], num_decode=2, dtype=torch.float32, head_dim=32)
    out = check(backend, padded(case, num_decode=2, num_prefill=0, num_tokens=9, max_kv_len=40), device=device)
    assert out[:2].all() and not out[2:].any()


@pytest.mark.parametrize("num_decode", [0, 4])
def test_a_row_has_the_same_bits_alone_and_among_others(backend, device, num_decode):
    """In any step, and with any number of programs sharing its keys."""
    rows = [(1, 70), (1, 30), (1, 100), (1, 65)] if num_decode else [(20, 70), (3, 3), (40, 64), (7, 33)]
    case = make_case(rows, num_decode=num_decode, dtype=torch.float32, head_dim=32, num_kv_heads=1)
    out = run(backend, case, device)
    assert torch.equal(run(make_backend(num_cores=64), case, device), out)
    for i in range(len(rows)):
        assert torch.equal(run(backend, one_row(case, i), device), out[case.meta.cu_q[i] : case.meta.cu_q[i + 1]])


def test_a_prompt_has_the_same_bits_however_it_is_cut(backend, device):
    case = make_case([(60, 60)], num_decode=0, dtype=torch.float32, head_dim=32, num_kv_heads=1)
    whole, cache = case.on(device).run(backend)
    for first in (10, 30, 50) if device.type == "cpu" else (1, 29, 33):  # numpy: by place in a matrix
        later = make_case([(60 - first, 60)], num_decode=0, dtype=torch.float32, head_dim=32, num_kv_heads=1)
        later.fused, later.kv_cache = case.fused[first:], cache.cpu()
        later.meta.block_table, later.meta.table_row_R = case.meta.block_table, case.meta.table_row_R
        later.meta.kv_pos_T = case.meta.kv_pos_T[first:]
        assert torch.equal(run(backend, later, device), whole.cpu()[first:])


def test_contiguous_and_transposed_inputs_are_both_taken(backend, device):
    case = make_case([(1, 9), (4, 12)], num_decode=1, dtype=torch.float32).on(device)
    want, _ = case.run(backend)
    heads = case.fused.view(-1, 2, 5, 64)
    odd = heads[:, :, :3].transpose(-1, -2).contiguous().transpose(-1, -2)  # last dim not contiguous
    backend.plan(case.meta)
    k, v = heads[:, :, -2].contiguous(), heads[:, :, -1]
    out = backend.run(odd, k, v, case.kv_cache.clone(), layer=case.layer, spec=case.spec)
    assert torch.equal(out, want)


def test_garbage_behind_a_rows_keys_does_not_reach_it(backend, device):
    rows = [(1, 20), (5, 19)]
    case = make_case(rows, num_decode=1, dtype=torch.float32, head_dim=32)
    want = run(backend, case, device)
    behind = torch.ones(case.kv_cache.shape[2] * 16, dtype=torch.bool)
    for row, (_, kv_len) in enumerate(rows):
        blocks = case.meta.block_table[int(case.meta.table_row[row])].long()
        behind[(blocks[:, None] * 16 + torch.arange(16)).flatten()[:kv_len]] = False
        case.meta.block_table[int(case.meta.table_row[row]), -(-kv_len // 16) :] = 2**30
    case.kv_cache.flatten(2, 3)[:, :, behind] = float("nan")
    assert torch.equal(run(backend, case, device), want)


def test_nothing_is_read_from_the_hosts_arrays(backend, device):
    case = make_case([(1, 70), (9, 40)], num_decode=1, dtype=torch.float32, head_dim=32).on(device)
    want, _ = case.run(backend)
    case.meta.q_len = case.meta.kv_len = case.meta.cu_q = case.meta.table_row = None
    out, _ = case.run(backend)
    assert torch.equal(out, want)


def test_what_cannot_run_is_refused_by_name(backend):
    spec = make_case([(1, 1)], num_decode=1, dtype=torch.float32).spec
    settings = {"dtype": torch.float32, "block_size": 16}
    assert backend.supports(spec, **settings) is None
    for change, reason in (
        ({"head_dim": 264}, "head_dim"),
        ({"head_dim": 20}, "head_dim"),
        ({"scale": -1.0}, "scale"),
        ({"rotary_dim": 66}, "rotary_dim"),
        ({"window": 0}, "window"),
    ):
        assert reason in backend.supports(dataclasses.replace(spec, **change), **settings)
    latent = latents([(1, 1)], num_decode=1, dtype=torch.float32).spec
    assert backend.supports(latent, **settings) is None
    for change, got in (({"head_dim": 16 + 520}, "got 520 and 16"), ({"value_start": 12}, "got 36 and 12")):
        assert got in backend.supports(dataclasses.replace(latent, **change), **settings)
    assert "float64" in backend.supports(spec, dtype=torch.float64, block_size=16)


def test_a_captured_step_replays_on_other_content(device, dtype):
    shape = {"num_decode": 3, "num_prefill": 2, "num_tokens": 40, "max_kv_len": 400}
    first = make_case([(1, 300), (9, 20)], num_decode=1, dtype=dtype, rotary_dim=64)
    second = make_case([(1, 20), (1, 290), (30, 37)], num_decode=2, dtype=dtype, rotary_dim=64, seed=1)
    size = max(first.kv_cache.shape[2], second.kv_cache.shape[2])
    first, second = (padded(case, **shape).on(device) for case in (first, second))
    backend, fixed, found = make_backend(chunk=64), copy.deepcopy(first), []  # where the graph reads
    fixed.meta.block_table = torch.zeros(16, 64, dtype=torch.int32, device=device)
    fixed.kv_cache = first.kv_cache.new_zeros(2, 2, size, *first.kv_cache.shape[3:])

    def step() -> None:
        backend.plan(fixed.meta)
        found[:] = [backend.run(*fixed.parts(fixed.fused), fixed.kv_cache, layer=1, spec=fixed.spec)]

    replay = captured(step, device)
    for case in (first, second, first):
        rows, blocks = case.meta.block_table.shape
        fixed.meta.block_table[:rows, :blocks].copy_(case.meta.block_table)
        for name in ("q_len_R", "kv_len_R", "cu_q_R1", "table_row_R", "positions_T", "kv_pos_T", "cos_TR", "sin_TR"):
            getattr(fixed.meta, name).copy_(getattr(case.meta, name))
        fixed.fused.copy_(case.fused)
        fixed.kv_cache[:, :, : case.kv_cache.shape[2]].copy_(case.kv_cache)
        replay()
        assert torch.equal(found[0], case.run(make_backend(chunk=64))[0])


@pytest.mark.parametrize("inference", [True, False])
def test_a_cache_that_is_dropped_is_free_and_another_one_is_read(device, inference):
    """Views of the layers are kept from step to step, and must not keep a cache that a suspend releases."""
    case = make_case([(1, 40), (3, 9)], num_decode=1, dtype=torch.float32, seed=3).on(device)
    other = dataclasses.replace(case, kv_cache=case.kv_cache.flip(0) * 2)
    backend = make_backend()
    with torch.inference_mode(inference):
        kept = [one.run(backend) for one in (case, other, case)]
        fresh = [one.run(make_backend()) for one in (case, other, case)]
    assert all(torch.equal(mine[0], want[0]) for mine, want in zip(kept, fresh, strict=True))
    places = {cache.untyped_storage().data_ptr() for _, cache in kept}
    del kept
    gc.collect()
    left = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    assert not [one for one in left if one.untyped_storage().data_ptr() in places]
