"""Recurrent states are saved with their requests and come back bit-equal, into other rows of another engine."""

from __future__ import annotations

import dataclasses
import json
import types

import msgspec
import pytest
import torch
from durable_case import PROMPT, Collector, add_all, make_engine, make_model
from model_kinds import RECURRENT
from model_kinds import make_model as make_kind
from store_case import build_store

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape, StateShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.durable import file_format
from megatron_infer.engine.durable.kv_restore import KVReturn, check_places, collect, describe, difference, num_places
from megatron_infer.engine.durable.request_codec import (
    RequestRecord,
    SavedKV,
    decode_request,
    encode_request,
    of_bytes,
    to_bytes,
)
from megatron_infer.errors import SnapshotError
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.scheduler.policy import blocks_needed

STATE = StateShape(num_layers=3, conv_shape=(10, 4), ssm_shape=(2, 4, 8), conv_dtype="bfloat16", ssm_dtype="float32")
HYBRID = ModelShape(
    num_layers=5,
    num_attention_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=128,
    padded_vocab_size=128,
    max_position=None,
    kv_dtype_bytes=4,
    dtype="float32",
    num_parameters=1000,
    state=STATE,
)


def make_store(num_layers=2, *, block_size=4, rows=6, seed=None):
    layout = StoreLayout(
        kv_shape=(num_layers, 2, 33, block_size, 2, 8),
        dtype=torch.float32,
        state=STATE,
        num_state_slots=rows + 1,
        dummy_state_slot=rows,
    )
    store = build_store(layout)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        store.kv_cache.copy_(torch.randn(store.kv_cache.shape, generator=generator))
        content = torch.randint(0, 256, (rows, STATE.slot_bytes), generator=generator, dtype=torch.uint8)
        store.write_states(range(rows), content)
    return store


def request(name, scheduled, row=None, blocks=()):
    lease = None if row is None else types.SimpleNamespace(row=row, blocks=list(blocks))
    return types.SimpleNamespace(id=name, scheduled=scheduled, lease=lease, in_flight=0)


def workers():
    """b shares a's first two blocks; c waits; d has a lease and nothing computed."""
    return [
        request("a", 11, 4, [7, 2, 9, 20]),
        request("b", 9, 0, [7, 2, 13]),
        request("c", 0),
        request("d", 0, 3, [5]),
    ]


class Scheduler:
    """Hands out rows from the last one down, and blocks that follow one another, as an engine of its own would."""

    def __init__(self, block_size, rows):
        self.size, self.rows, self.next_block = block_size, list(range(rows)), 1

    def readmit(self, request, computed, *, like, num_shared):
        if not self.rows:
            return False
        shared = [] if like is None else like.lease.blocks[: num_shared // self.size]
        fresh = blocks_needed(computed, self.size) - len(shared)
        blocks = [*shared, *range(self.next_block, self.next_block + fresh)]
        self.next_block += fresh
        request.lease = types.SimpleNamespace(row=self.rows.pop(), blocks=blocks)
        return True


def collected(requests, store):
    memory = collect(requests, store, attends=store.layout.block_bytes > 0, recurrent=True)
    return memory.saved, memory.tensors


def tokens_of(store, lease, count):
    """Keys and values of a sequence, [layers, 2, count, K, H]."""
    return store.kv_cache[:, :, lease.blocks].flatten(2, 3)[:, :, :count]


@pytest.mark.parametrize("block_size", [4, 2, 8])
@pytest.mark.parametrize("num_layers", [2, 0], ids=["hybrid", "pure Mamba"])
def test_saved_states_come_back_into_other_rows(tmp_path, num_layers, block_size):
    store, requests = make_store(num_layers, seed=1), workers()
    saved, tensors = collected(requests, store)
    assert list(saved) == ["a", "b"]
    assert [kv.state for kv in saved.values()] == [0, 1]
    assert ("blocks" in tensors) == (num_layers > 0) and tensors["states"].shape == (2, STATE.slot_bytes)
    assert num_layers or not saved["a"].blocks

    file_format.write(tmp_path / "requests", {"kv": describe(HYBRID)}, tensors)
    manifest, tensors = file_format.read(tmp_path / "requests")
    assert difference(HYBRID, manifest["kv"]) is None
    other = make_store(num_layers, block_size=block_size)
    returning = KVReturn(tensors, Scheduler(block_size, 6), other, block_size=4)
    back = [request("a", 0), request("b", 0)]
    for one in back:
        check_places(saved[one.id], num_places(None, tensors))
        assert returning.readmit(one, saved[one.id])
    for one, source in zip(back, requests, strict=False):
        assert one.lease.row != source.lease.row
        assert torch.equal(other.read_states([one.lease.row]), store.read_states([source.lease.row]))
        count = source.scheduled
        assert torch.equal(tokens_of(other, one.lease, count), tokens_of(store, source.lease, count))
    assert not other.read_states([0, 1, 2, 3, 6]).any(), "somebody else's slot was written"
    if num_layers:
        assert back[0].lease.blocks[: 8 // block_size] == back[1].lease.blocks[: 8 // block_size]


def test_without_room_nothing_is_written():
    store = make_store(seed=1)
    saved, tensors = collected(workers(), store)
    other = make_store()
    assert not KVReturn(tensors, Scheduler(4, 0), other, block_size=4).readmit(request("a", 0), saved["a"])
    assert not other.read_states(range(7)).any() and not other.kv_cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm_dtype": "bfloat16"}, "the model's state.ssm_dtype is bfloat16, it was float32"),
        ({"conv_dtype": "float32"}, "the model's state.conv_dtype is float32, it was bfloat16"),
        ({"ssm_shape": (2, 4, 16)}, "the model's state.ssm_shape is [2, 4, 16], it was [2, 4, 8]"),
        ({"conv_shape": (12, 4)}, "the model's state.conv_shape is [12, 4], it was [10, 4]"),
        ({"num_layers": 4}, "the model's state.num_layers is 4, it was 3"),
    ],
)
def test_states_of_another_model_are_refused_with_the_figures(change, message):
    saved = json.loads(json.dumps(describe(HYBRID)))
    assert difference(HYBRID, saved) is None
    assert difference(dataclasses.replace(HYBRID, state=dataclasses.replace(STATE, **change)), saved) == message


def test_a_model_with_states_and_one_without_are_not_the_same():
    plain = dataclasses.replace(HYBRID, state=None)
    assert difference(plain, describe(HYBRID)) == "the model's state.num_layers is None, it was 3"
    assert difference(HYBRID, describe(plain)) == "the model's state.num_layers is 3, it was None"


def test_a_state_or_block_that_the_file_lacks_is_an_error():
    _, tensors = collected(workers(), make_store(seed=1))
    counts = num_places(None, tensors)
    check_places(SavedKV(num_tokens=3, blocks=[0, 3], state=1), counts)
    with pytest.raises(ValueError, match=r"states \[2\] of 2"):
        check_places(SavedKV(num_tokens=3, blocks=[0], state=2), counts)
    with pytest.raises(ValueError, match=r"blocks \[4\] of 4"):
        check_places(SavedKV(num_tokens=3, blocks=[0, 4], state=1), counts)
    with pytest.raises(ValueError, match=r"states \[0\] of 0"):
        check_places(SavedKV(num_tokens=3, blocks=[], state=0), num_places(None, {}))
    with pytest.raises(ValueError, match="4 blocks, 5 are named"):
        num_places({"num_blocks": 5, "shape": {}}, tensors)


@pytest.fixture(scope="module")
def attention():
    """An engine without recurrent state, some steps in."""
    engine = make_engine(make_model())
    add_all(engine)
    Collector().step(engine, 5)
    return engine


def test_records_carry_the_state(attention):
    state = attention.output_processor.requests[0]
    for kv in (SavedKV(num_tokens=7, blocks=[3, 0], state=5), SavedKV(num_tokens=7, blocks=[], state=0)):
        written = to_bytes(encode_request(state, now=1.0, kv={state.sequences[0].request.id: kv}))
        record = of_bytes(written, RequestRecord)
        assert decode_request(record, tokenizer=None, now=1.0).saved[0].kv == kv


def test_files_without_states_name_none(attention, tmp_path):
    path = tmp_path / "requests"
    attention.save_requests(path, kv=True)
    manifest, tensors = file_format.read(path)
    assert set(tensors) == {"records", "blocks"}
    assert not any(name.startswith("state") for name in manifest["kv"]["shape"])
    records = msgspec.msgpack.decode(tensors["records"].numpy().tobytes())["requests"]
    stored = [one["place"]["kv"] for record in records for one in record["sequences"] if one["place"]["kv"] is not None]
    assert stored and all(kv["state"] is None for kv in stored)


def test_a_file_that_lost_its_blocks_is_refused_whole(attention, tmp_path):
    path = tmp_path / "requests"
    attention.save_requests(path, kv=True)
    manifest, tensors = file_format.read(path)
    file_format.write(path, manifest, {**tensors, "blocks": tensors["blocks"][:1].clone()})
    with pytest.raises(SnapshotError, match=r"cannot be understood .*1 blocks, \d+ are named"):
        make_engine(make_model()).load_requests(path)
    file_format.write(path, manifest, {name: tensor for name, tensor in tensors.items() if name != "blocks"})
    with pytest.raises(SnapshotError, match=r"cannot be understood .*0 blocks, \d+ are named"):
        make_engine(make_model()).load_requests(path)


@pytest.mark.parametrize("kind", RECURRENT)
def test_states_of_another_dtype_are_computed_again(kind, tmp_path):
    recurrent = make_kind(kind)
    source = make_engine(recurrent)
    source.add_request(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    Collector().step(source, 2)
    source.save_requests(tmp_path / "requests", kv=True)
    state = dataclasses.replace(MambaInferenceStateConfig.from_model(recurrent), ssm_states_dtype="bfloat16")
    engine = make_engine(recurrent, mamba_inference_state_config=state)
    report = engine.load_requests(tmp_path / "requests")
    assert report.recomputed == {"0": "the model's state.ssm_dtype is bfloat16, it was float32"}
    assert Collector().step(engine).finished["0"].finished
