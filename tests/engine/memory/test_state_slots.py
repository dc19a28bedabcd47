"""KV blocks and recurrent states in one store: they come back as they were, and a failure on the way loses nothing."""

from __future__ import annotations

import random

import pytest
import torch
from store_case import (
    RandomCopies,
    Recorder,
    block_in,
    block_out,
    build_store,
    copy_block,
    copy_state,
    cut_pieces,
    quiet,
    state_in,
    state_out,
)

from megatron_infer.config.model_shape import StateShape
from megatron_infer.errors import StateReleased
from megatron_infer.memory.store_layout import StoreLayout

STATE = StateShape(
    num_layers=3, conv_shape=(10, 4), ssm_shape=(2, 4, 8), conv_dtype="bfloat16", ssm_dtype="float32"
)  # conv 240 -> 256 bytes, ssm 768
SLOTS, DUMMY = 9, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ATTENTION_LAYERS = [3, 0]


def make_store(num_layers=3, *, state=STATE, device="cpu", static=False, host_slots=6, host_states=6, **more):
    """more: other fields of the layout."""
    if device == "cuda" and static:
        pytest.importorskip("torch_memory_saver")
    slots = {"num_state_slots": SLOTS, "dummy_state_slot": DUMMY} if state else {}
    layout = StoreLayout(kv_shape=(num_layers, 2, 8, 4, 2, 8), state=state, **{"dtype": torch.float32} | slots | more)
    return build_store(layout, device=device, static=static, host_slots=(host_slots, host_states if state else 0))


def fill(store, seed=0):
    """Random content everywhere but in the dummies -> copies of (KV cache, states as bytes)."""
    generator = torch.Generator().manual_seed(seed)
    cache, states = store.kv_cache, store.states
    cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
    cache[:, :, store.layout.dummy_block] = 0
    for view in (states.conv_SLCW, states.ssm_SLHPN):
        view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
        view[DUMMY] = 0
    return cache.clone(), store.read_states(range(SLOTS))


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of two states and one block, so that small tests cross their borders."""
    cut_pieces(monkeypatch, 2 * STATE.slot_bytes)


def test_a_slot_holds_conv_then_ssm_of_all_layers():
    store = make_store()
    fill(store)
    assert (STATE.conv_bytes, STATE.ssm_bytes, STATE.slot_bytes) == (256, 768, 1024)
    whole = store.read_states([4, 2])
    assert whole.shape == (2, 1024) and whole.dtype == torch.uint8
    for place, slot in enumerate((4, 2)):
        conv = torch.cat([store.states.layer(i).conv_SCW[slot].flatten() for i in range(3)])
        ssm = torch.cat([store.states.layer(i).ssm_SHPN[slot].flatten() for i in range(3)])
        assert torch.equal(whole[place, :240], conv.view(torch.uint8))
        assert torch.equal(whole[place, 256:], ssm.view(torch.uint8))
    for i in range(3):
        conv_SCW, ssm_SHPN = store.states.layer(i)
        assert (conv_SCW.shape, conv_SCW.dtype) == ((SLOTS, 10, 4), torch.bfloat16)
        assert (ssm_SHPN.shape, ssm_SHPN.dtype) == ((SLOTS, 2, 4, 8), torch.float32)
        assert conv_SCW[3].is_contiguous() and ssm_SHPN[3].is_contiguous()
        assert ssm_SHPN.data_ptr() % 64 == 0


def test_views_are_made_once_per_allocation():
    store = make_store()
    states, layer = store.states, store.states.layer(1)
    assert store.states is states and states.layer(1) is layer and store.kv_cache is store.kv_cache
    store.release(quiet)
    store.restore(set(), quiet)
    assert store.states is not states


def test_pools_do_not_touch_each_other():
    store = make_store()
    store.kv_cache.fill_(3.0)
    assert not store.read_states(range(SLOTS)).any()
    store.write_states(range(SLOTS), torch.full((SLOTS, 1024), 7, dtype=torch.uint8))
    assert (store.kv_cache == 3.0).all()
    assert store.layout.num_bytes >= 8 * store.layout.block_bytes + SLOTS * 1024


def test_a_store_without_states_ignores_what_is_asked_of_them():
    store = make_store(state=None)
    assert store.states is None and store.layout.num_bytes == 8 * store.layout.block_bytes
    store.measure_copies()
    assert store.copy_s_per_state == 0.0
    store.run_copies([])
    store.free_host_slots(states=[0])
    assert store.offload([1], quiet).bytes_copied == store.layout.block_bytes
    store.restore({1}, quiet)
    # A pipeline stage without Mamba layers is given the moves of states that other stages keep.
    store.kv_cache.fill_(3.0)
    store.run_copies([state_out(0, 0), state_in(0, 1), copy_state(0, 1)])
    store.run_copies([copy_state(0, 1)])
    assert store.offload([0], quiet, state_slots=[0]).bytes_copied == store.layout.block_bytes
    store.restore({0}, quiet, keep_states={0})
    assert (store.kv_cache[:, :, 0] == 3.0).all()


def test_a_dummy_slot_must_be_named():
    with pytest.raises(AssertionError, match="dummy state slot None of 9"):
        StoreLayout(kv_shape=(0, 2, 2, 4, 1, 1), dtype=torch.float32, state=STATE, num_state_slots=9)


def test_blocks_without_attention_layers_have_no_memory():
    store = make_store(0)
    assert store.kv_cache.shape == (0, 2, 8, 4, 2, 8)
    assert (store.layout.block_bytes, store.layout.num_bytes) == (0, SLOTS * 1024)
    store.measure_copies()
    assert store.copy_s_per_block == 0.0
    store.run_copies([copy_block(0, 1)])
    store.run_copies([block_out(0, 0), block_in(0, 1)])
    store.free_host_slots([0])
    _, before = fill(store)
    assert store.offload([0, 1], quiet, state_slots=[3]).bytes_copied == 1024
    store.restore({0, 1}, quiet, keep_states={3})
    assert torch.equal(store.read_states([3]), before[[3]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("num_layers", ATTENTION_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[0, 8, 3, 6, 1], list(range(5)), []], ids=str)
def test_offloaded_states_and_blocks_come_back_bit_equal(num_layers, static, slots, dtype, device, small_pieces):
    store = make_store(num_layers, static=static, device=device, dtype=dtype)
    (cache, states), blocks = fill(store), [6, 0, 4, 5, 2, 1] if slots else []
    copied = (len(blocks) if num_layers else 0) * store.layout.block_bytes + len(slots) * 1024
    assert store.offload(blocks, quiet, state_slots=slots).bytes_copied == copied
    assert store.restore(set(blocks), quiet, keep_states=set(slots)).bytes_copied == copied
    assert torch.equal(store.read_states([*slots, DUMMY]), states[[*slots, DUMMY]])
    assert torch.equal(store.kv_cache[:, :, [*blocks, 7]], cache[:, :, [*blocks, 7]])
    assert store.host_bytes() == 0 and not store.is_released
    if device == "cpu":
        others = [slot for slot in range(SLOTS) if slot not in slots]
        assert not store.read_states(others).any(), "more than the given slots was copied"
        assert not store.kv_cache[:, :, [block for block in range(7) if block not in blocks]].any()


def test_memory_of_requests_aborted_meanwhile_stays_behind():
    store = make_store()
    cache, states = fill(store)
    store.offload([1, 2, 3, 4], quiet, state_slots=[0, 1, 2])
    report = store.restore({2, 4}, quiet, keep_states={2})
    assert report.bytes_copied == 2 * store.layout.block_bytes + STATE.slot_bytes and store.host_bytes() == 0
    assert torch.equal(store.kv_cache[:, :, [2, 4]], cache[:, :, [2, 4]]) and not store.kv_cache[:, :, [1, 3]].any()
    assert torch.equal(store.read_states([2]), states[[2]]) and not store.read_states([0, 1]).any()


def test_asking_for_what_was_not_offloaded_is_refused_and_harmless():
    store = make_store()
    cache, states = fill(store)
    store.offload([1], quiet, state_slots=[2])
    with pytest.raises(AssertionError, match=r"states \[4\].*were not offloaded"):
        store.restore({1}, quiet, keep_states={2, 4})
    with pytest.raises(AssertionError, match=r"\[6\].*were not offloaded"):
        store.restore({1, 6}, quiet, keep_states={2})
    store.restore({1}, quiet, keep_states={2})
    assert torch.equal(store.read_states([2]), states[[2]])
    assert torch.equal(store.kv_cache[:, :, 1], cache[:, :, 1])


BLOCKS, KEPT_SLOTS = [5, 1, 3], [8, 1, 0, 4, 7]  # five pieces, then seven of states


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("static", [False, True])
def test_offload_that_fails_anywhere_changes_neither_pool(static, error, small_pieces):
    rehearsal = Recorder()
    make_store(static=static).offload(BLOCKS, rehearsal, state_slots=KEPT_SLOTS)
    assert len(rehearsal.calls) == 5 + 7 + 1, rehearsal.calls
    for fail_at in range(len(rehearsal.calls)):
        store = make_store(static=static)
        (cache, states), held, address = fill(store), store.states, store.kv_cache.data_ptr()
        with pytest.raises(error):
            store.offload(BLOCKS, Recorder(fail_at, error), state_slots=KEPT_SLOTS)
        assert not store.is_released and store.states is held and store.host_bytes() == 0
        assert store.kv_cache.data_ptr() == address
        assert torch.equal(store.kv_cache, cache) and torch.equal(store.read_states(range(SLOTS)), states)
        store.offload(BLOCKS, quiet, state_slots=KEPT_SLOTS)
        store.restore(set(BLOCKS), quiet, keep_states=set(KEPT_SLOTS))
        assert torch.equal(store.kv_cache[:, :, BLOCKS], cache[:, :, BLOCKS])
        assert torch.equal(store.read_states(KEPT_SLOTS), states[KEPT_SLOTS])


def test_layers_go_and_come_back_in_the_order_in_which_a_step_uses_them():
    order = ["states", "blocks", "blocks", "states", "states", "blocks"]
    store, out, back = make_store(layer_order=order), Recorder(), Recorder()
    store.offload([1, 2], out, state_slots=[0, 3])
    store.restore({1, 2}, back, keep_states={0, 3})
    expected = [
        "states 0",
        "states 0",
        "blocks 0",
        "blocks 1",
        "states 1",
        "states 1",
        "states 2",
        "states 2",
        "blocks 2",
    ]
    for calls in (out.calls[:-1], back.calls[1:]):
        assert [f"{words[1]} {words[8].strip(',')}" for words in map(str.split, calls)] == expected, "two parts a state"


def test_a_region_that_cannot_be_released_leaves_both_pools(monkeypatch):
    store = make_store()
    cache, states = fill(store)

    def broken():
        raise OSError("no")

    for command in (lambda: store.release(quiet), lambda: store.offload([0], quiet, state_slots=[0])):
        with monkeypatch.context() as patch:
            patch.setattr(store._region, "release", broken)
            with pytest.raises(OSError, match="no"):
                command()
        assert not store.is_released and store.host_bytes() == 0
        assert torch.equal(store.kv_cache, cache) and torch.equal(store.read_states(range(SLOTS)), states)


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("static", [False, True])
def test_restore_that_fails_anywhere_can_be_tried_again(static, error, small_pieces):
    store = make_store(static=static)
    cache, states = fill(store)
    store.offload(BLOCKS, quiet, state_slots=KEPT_SLOTS)
    host_bytes, rehearsal = store.host_bytes(), Recorder()
    store.restore(set(BLOCKS), rehearsal, keep_states=set(KEPT_SLOTS))
    assert len(rehearsal.calls) == 1 + 5 + 7, rehearsal.calls
    store.offload(BLOCKS, quiet, state_slots=KEPT_SLOTS)
    for fail_at in range(len(rehearsal.calls)):
        with pytest.raises(error):
            store.restore(set(BLOCKS), Recorder(fail_at, error), keep_states=set(KEPT_SLOTS))
        assert store.is_released and store.resident_bytes() == 0 and store.host_bytes() == host_bytes
        with pytest.raises(StateReleased):
            _ = store.kv_cache
    store.restore(set(BLOCKS), quiet, keep_states=set(KEPT_SLOTS))
    assert torch.equal(store.kv_cache[:, :, BLOCKS], cache[:, :, BLOCKS])
    assert torch.equal(store.read_states(KEPT_SLOTS), states[KEPT_SLOTS])
    assert not store.kv_cache[:, :, store.layout.dummy_block].any()
    assert not store.read_states([DUMMY]).any() and store.host_bytes() == 0


@pytest.mark.parametrize("how", ["release", "offload"])
def test_dummies_are_zero_again_where_memory_comes_back_dirty(how, monkeypatch):
    """Fresh pages of a CPU are zeros; the memory of a GPU holds what its last owner left."""
    store = make_store(static=True)
    fill(store)
    store.release(quiet) if how == "release" else store.offload([1], quiet, state_slots=[1])
    monkeypatch.setattr(store._region, "restore", lambda: store._region.tensor.fill_(255))
    store.restore(set(), quiet)
    assert not store.read_states([DUMMY]).any() and not store.kv_cache[:, :, store.layout.dummy_block].any()
    assert store.read_states([1]).all(), "only the dummy is cleared"


@pytest.mark.parametrize("how", ["release", "offload"])
def test_nothing_reads_or_writes_released_memory(how):
    store = make_store()
    fill(store)
    store.release(quiet) if how == "release" else store.offload([1], quiet, state_slots=[1, 2])
    assert store.is_released
    words = "resume before" if how == "release" else r"1 blocks, 2 states of it are kept .* resume before"
    for use in (
        lambda: store.kv_cache,
        lambda: store.run_copies([copy_block(0, 1)]),
        lambda: store.read_blocks([0]),
        lambda: store.write_blocks([0], {}),
        lambda: store.run_copies([block_out(0, 0)]),
        lambda: store.release(quiet),
        lambda: store.offload([0], quiet),
        lambda: store.states,
        lambda: store.run_copies([copy_state(0, 1)]),
        lambda: store.read_states([0]),
        lambda: store.write_states([0], torch.zeros(1, 1024, dtype=torch.uint8)),
        lambda: store.run_copies([state_out(0, 0)]),
        lambda: store.run_copies([copy_state(1, 0)]),
        lambda: store.measure_copies(),
    ):
        with pytest.raises(StateReleased, match=words):
            use()
    assert (store.drop_host_copy() > 0) == (how == "offload")
    store.restore(set(), quiet)
    assert store.kv_cache.shape == (3, 2, 8, 4, 2, 8)
    assert store.states.layer(0).conv_SCW.shape == (SLOTS, 10, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_layers", ATTENTION_LAYERS)
@pytest.mark.parametrize("seed", range(20))
def test_moves_of_every_kind_do_what_one_after_the_other_would(seed, num_layers, device, small_pieces):
    store = make_store(num_layers, device=device)
    cache, states = fill(store)
    blocks, slots = range(7), [slot for slot in range(SLOTS) if slot != DUMMY]
    copies = RandomCopies(random.Random(seed), num_slots=6, block=blocks, state=slots)
    for _ in range(25):
        store.run_copies(drawn := copies.draw(30))
        for slot in slots:
            assert torch.equal(store.read_states([slot]), states[[copies.held["state", slot]]]), (drawn, slot)
        for block in blocks:
            assert torch.equal(store.kv_cache[:, :, block], cache[:, :, copies.held["block", block]]), (drawn, block)
        store.free_host_slots(copies.free("block"), copies.free("state"))
    assert not store.read_states([DUMMY]).any() and not store.kv_cache[:, :, store.layout.dummy_block].any()
    for (pool, slot), content in copies.held.items():
        if pool == "host block" and num_layers:
            store.run_copies([block_in(slot, 0)])
            assert torch.equal(store.kv_cache[:, :, 0], cache[:, :, content])


@pytest.mark.parametrize(
    "copies, expected",
    [
        ([copy_state(0, 1), copy_state(1, 2)], [0, 0, 0, 3]),  # read after write
        ([copy_state(1, 0), copy_state(2, 1)], [1, 2, 2, 3]),  # write after read
        ([copy_state(1, 0), copy_state(2, 0)], [2, 1, 2, 3]),  # the last one stays
        ([copy_state(0, 3), copy_state(1, 0), copy_state(3, 1)], [1, 0, 2, 0]),  # 0 and 1 change places
        ([state_out(0, 5), copy_state(1, 0), state_in(5, 3)], [1, 1, 2, 0]),
        ([state_out(2, 0), state_in(0, 0), copy_state(0, 1), state_out(3, 0), state_in(0, 2)],
         [2, 2, 3, 3]),
    ],
)  # fmt: skip
def test_a_slot_written_by_one_copy_is_read_by_the_next(copies, expected):
    store = make_store()
    _, states = fill(store)
    store.run_copies(copies)
    assert torch.equal(store.read_states(range(4)), states[expected])


def test_states_written_are_the_states_read(small_pieces):
    store, other = make_store(), make_store(0)
    _, states = fill(store)
    other.write_states([7, 0], store.read_states([2, 6]))
    assert torch.equal(other.states.layer(2).ssm_SHPN[7], store.states.layer(2).ssm_SHPN[2])
    assert torch.equal(other.read_states([0]), states[[6]])
    with pytest.raises(AssertionError, match=r"slots of 1,024"):
        other.write_states([0], torch.zeros(1, 1000, dtype=torch.uint8))


def test_host_slots_are_bounded_and_give_their_memory_back():
    store = make_store(host_slots=2, host_states=2)
    fill(store)
    for out, back in ((block_out, block_in), (state_out, state_in)):
        with pytest.raises(AssertionError, match="host slot 2 of 2"):
            store.run_copies([out(0, 2)])
        with pytest.raises(AssertionError, match="hold nothing"):
            store.run_copies([back(1, 0)])
        store.run_copies([out(0, 0), out(1, 1)])
    assert store.host_bytes() > 0
    store.free_host_slots([0, 1], [0, 1])
    assert store.host_bytes() == 0
    for back in (block_in, state_in):
        with pytest.raises(AssertionError, match="hold nothing"):
            store.run_copies([back(1, 0)])


def test_swapped_memory_outlives_a_release():
    store = make_store()
    cache, states = fill(store)
    store.run_copies([state_out(4, 2), block_out(5, 2)])
    store.release(quiet)
    store.restore(set(), quiet)
    store.run_copies([state_in(2, 7), block_in(2, 6)])
    assert torch.equal(store.read_states([7]), states[[4]]) and torch.equal(store.kv_cache[:, :, 6], cache[:, :, 5])


@pytest.mark.parametrize("device", DEVICES)
def test_speed_is_measured_followed_and_leaves_no_trace(device):
    store = make_store(device=device)
    cache, states = fill(store)
    assert store.copy_s_per_state == 0.0
    store.measure_copies()
    assert 0 < store.copy_s_per_state < 1 and 0 < store.copy_s_per_block < 1 and store.host_bytes() == 0
    assert torch.equal(store.kv_cache, cache) and torch.equal(store.read_states(range(SLOTS)), states)
    block, state = store.copy_s_per_block, store.copy_s_per_state
    store.run_copies([state_out(0, 0), copy_state(0, 1)])
    if device == "cpu":
        assert store.copy_s_per_state != state and store.copy_s_per_block == block


@pytest.mark.parametrize("static", [False, True])
def test_addresses_are_kept_with_static_pointers(static):
    store = make_store(static=static)
    assert store.addresses_stable is static
    states, cache = store.states, store.kv_cache  # held: else a new mapping may land in the same place
    addresses = states.conv_SLCW.data_ptr(), cache.data_ptr()
    for _ in range(3):
        store.release(quiet)
        store.restore(set(), quiet)
        now = store.states.conv_SLCW.data_ptr(), store.kv_cache.data_ptr()
        assert [one == other for one, other in zip(now, addresses, strict=True)] == [static] * 2
    assert (states.conv_SLCW.data_ptr(), cache.data_ptr()) == addresses


def test_memory_restored_in_inference_mode_can_be_written_outside_it():
    store = make_store()
    fill(store)
    with torch.inference_mode():
        store.offload([0], quiet, state_slots=[0])
        store.restore({0}, quiet, keep_states={0})
        store.run_copies([block_out(0, 0)])
    store.states.layer(0).ssm_SHPN[1].fill_(2.0)
    assert (store.states.layer(0).ssm_SHPN[1] == 2.0).all()
    store.kv_cache[:, :, 1].fill_(2)
    store.run_copies([block_in(0, 1)])
    assert torch.equal(store.kv_cache[:, :, 1], store.kv_cache[:, :, 0])
