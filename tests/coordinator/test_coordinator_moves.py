"""Requests that move between replicas with their memory answer as those of one engine, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import zmq
from coordinator_case import cluster, coordinator, replica, wait_for
from durable_case import PROMPT, make_engine, make_model, pool_of
from echo import EchoEngine
from ports import free_port
from zmq.utils import z85

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import access, parcel_transfer
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.parcel_transfer import ParcelTransfer
from megatron_infer.coordinator.protocol import ControlFailed, ParcelPlace, Refused
from megatron_infer.coordinator.replica import Replica
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.metrics.definitions import as_row
from megatron_infer.engine.metrics.server_meter import ServerMeter
from megatron_infer.errors import ConfigError, OtherRankFailed, RankFailure

PARAMS = [
    SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=140, seed=4, n=2, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=150, seed=5, repetition_penalty=1.2, ignore_eos=True, return_support=True, top_k=9),
    SamplingParams(max_tokens=1, seed=6, logprobs=1),
    SamplingParams(max_tokens=130, seed=7, prompt_logprobs=1, ignore_eos=True),
]
PROMPTS = [PROMPT[i:] for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def expected(model):
    return [answer(one) for one in make_engine(model).generate(PROMPTS, PARAMS)]


def answer(output) -> tuple:
    assert output.error is None
    each = [
        (one.token_ids, one.logprobs, one.support, one.finish_reason, one.cumulative_logprob) for one in output.outputs
    ]
    return output.prompt_logprobs, each


def computed(*engines) -> int:
    return sum(engine.stats().counters["prefill_tokens"] for engine in engines)


@contextlib.contextmanager
def of_roles(model, *, versions=(), settings=(), **roles):
    """(coordinator, engines by name, client): a replica of each role, by its name. versions: of weights, by name.
    settings: of the engines."""
    engines = {name: make_engine(model, prefix="lru", **dict(settings)) for name in roles}
    for name, version in dict(versions).items():
        engines[name].set_weight_version(version)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(coordinator(role_min_prompt_tokens=8))
        client = stack.enter_context(InferenceClient(one.address))
        for name, role in roles.items():
            stack.enter_context(replica(one.address, engines[name], name=name, role=role))
        wait_for(lambda: len(client.stats()["replicas"]) == len(roles))
        yield one, engines, client


def parcels(client, *replicas) -> list[tuple]:
    """Of each (replica, way) the parcels, whether they had bytes and took time, and the failures, as metrics."""
    meter = ServerMeter()
    meter.update(client.stats())
    row = as_row(meter.families(), prefix="")
    counts = []
    for name, way in replicas:
        names = [f"replica_parcel{what}_total/{name}/{way}" for what in ("s", "_bytes", "_seconds", "_failures")]
        of = [row.get(one, 0.0) for one in names]  # a replica reports with its next heartbeat
        counts.append((of[0], of[1] > 0, of[2] > 0, of[3]))
    return counts


def is_empty(one, engines) -> None:
    wait_for(lambda: not any(replica["running"] for replica in one.core.stats()["replicas"]))
    one.core.check()
    for engine in engines:
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("key", [None, secrets.token_bytes(32)], ids=["ipc", "tcp with a key"])
def test_a_drained_replica_hands_its_requests_on_and_takes_none_until_it_may(model, expected, key):
    engines = [make_engine(model, prefix="lru") for _ in range(2)]
    with cluster(engines=engines, key=key) as (one, _, client):
        client.drain("r1")
        futures = [client.submit(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
        stream = client.stream(PROMPTS[0], PARAMS[0])
        first = next(stream)
        wait_for(lambda: client.stats()["replicas"][0]["running"] >= 4)
        client.drain("r1", end=True)
        client.drain("r0", move=True)
        assert [answer(future.result(60)) for future in futures] == expected
        last = [first, *stream][-1]
        assert last.outputs[0].token_ids == expected[0][1][0][0]
        stats = client.stats()
        assert stats["moved"] >= 3 and not stats["resent"] and not stats["replicas_lost"]
        assert stats["replicas"][0]["state"] == "draining"
        assert computed(*engines) <= sum(map(len, PROMPTS)) + len(PROMPTS[0]), "a prompt was computed again"
        client.generate(PROMPTS[1], PARAMS[1])
        assert engines[1].stats().counters["finished"] and not client.stats()["replicas"][0]["running"]
        client.drain("r0", end=True)
        assert client.stats()["replicas"][0]["state"] == "running"
        with pytest.raises(ControlFailed, match="no replica 'r7'; there are: r0, r1"):
            client.drain("r7")
        is_empty(one, engines)


@pytest.mark.parametrize("roles", [("prefill_only", "decode_only"), ("prefill_only", "decode_only", "decode_only")])
def test_prompts_are_computed_on_one_side_and_answers_on_the_other(model, expected, roles):
    names = {f"r{i}": role for i, role in enumerate(roles)}
    with of_roles(model, **names) as (one, engines, client):
        outputs = client.generate(PROMPTS, PARAMS)
        assert [answer(output) for output in outputs] == expected
        stats = client.stats()
        assert stats["moved"] == 4 and not stats["resent"], "the one of one token stays"
        assert {replica["name"]: replica["role"] for replica in stats["replicas"]} == names
        decoding = [engine for name, engine in engines.items() if names[name] == "decode_only"]
        assert computed(*decoding) == 0, "a prompt was computed where answers are"
        if len(roles) == 2:
            wait_for(lambda: parcels(client, ("r0", "out"), ("r1", "in")) == [(4, True, True, 0)] * 2)
            assert parcels(client, ("r0", "in"), ("r1", "out")) == [(0, False, False, 0)] * 2
        short = client.generate(PROMPT[:5], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(short[0].outputs[0].token_ids) == 3 and computed(*decoding) == 5
        assert len(next(iter(client.stream(PROMPTS[2], PARAMS[2]))).outputs[0].token_ids) == 1
        is_empty(one, engines.values())


def test_memory_waits_for_a_row_and_is_not_computed_again(model):
    """Of more requests than the decode engine has rows for, one of three sequences among them."""
    params = [dataclasses.replace(PARAMS[0], max_tokens=20 + i) for i in range(9)]
    params[4] = dataclasses.replace(params[4], n=3, temperature=1.0, seed=4)
    prompts = [PROMPT[i:] for i in range(len(params))]
    want = [answer(one) for one in make_engine(model).generate(prompts, params)]
    with of_roles(model, settings={"max_requests": 3}, p="prefill_only", d="decode_only") as (one, engines, client):
        assert [answer(output) for output in client.generate(prompts, params)] == want
        assert computed(engines["d"]) == 0 and client.stats()["moved"] == len(params)
        futures = [client.submit([3, *prompt], PARAMS[0]) for prompt in prompts]
        wait_for(lambda: client.stats()["moved"] > len(params) + 3)
        for future in futures:  # some run, others wait with their memory
            client.abort(future)
        assert all(future.result(60).finished for future in futures)
        is_empty(one, engines.values())


@pytest.mark.long
def test_memory_that_waits_begins_when_the_last_request_ends(model):
    """No message comes after that: the one that waits is the last one."""
    both = [dataclasses.replace(PARAMS[0], n=3, temperature=1.0, seed=4), PARAMS[0]]
    want = [answer(one) for one in make_engine(model).generate([PROMPT, PROMPT[1:]], both)]
    with of_roles(model, settings={"max_requests": 3}, p="prefill_only", d="decode_only") as (_, engines, client):
        futures = [client.submit(prompt, one) for prompt, one in zip((PROMPT, PROMPT[1:]), both, strict=True)]
        assert [answer(future.result(60)) for future in futures] == want
        assert computed(engines["d"]) == 0


@pytest.mark.long
def test_memory_that_takes_all_rows_is_not_overtaken_by_later_requests(model):
    """Short ones keep the rows busy from before until after it."""
    params = dataclasses.replace(PARAMS[0], max_tokens=20, n=6, temperature=1.0, seed=4)
    (want,) = make_engine(model).generate([PROMPT], params)
    stop = threading.Event()
    with of_roles(model, settings={"max_requests": 6}, p="prefill_only", d="decode_only") as (one, engines, client):

        def keep_busy(number):
            for _ in range(30):
                if stop.is_set():
                    return
                client.submit([3 + number, 4, 5], SamplingParams(max_tokens=40 + 17 * number, ignore_eos=True)).result(
                    60
                )

        with ThreadPoolExecutor(9) as pool:
            busy = [pool.submit(keep_busy, number) for number in range(9)]
            try:
                wait_for(lambda: engines["d"].stats().counters["finished"] > 6)
                assert answer(client.submit(PROMPT, params).result(60)) == answer(want)
                assert not any(one.done() for one in busy), "it began when the load had ended"
            finally:
                stop.set()
            assert [one.result(60) for one in busy] == [None] * 9
        assert client.stats()["moved"] == 1
        is_empty(one, engines.values())


@pytest.mark.long
def test_memory_that_waits_for_rows_is_bounded(model, monkeypatch):
    monkeypatch.setattr("megatron_infer.coordinator.replica.MAX_WAITING_BYTES", 1000)
    params = [dataclasses.replace(PARAMS[0], max_tokens=40)] * 6
    want = make_engine(model).generate(PROMPTS[:1] * 6, params)
    with of_roles(model, settings={"max_requests": 2}, p="prefill_only", d="decode_only") as (one, engines, client):
        same_tokens(client.generate(PROMPTS[:1] * 6, params), [answer(output) for output in want])
        assert client.stats()["moved"] == 6 and computed(engines["d"]) > 0, "none has gone on from its tokens"
        is_empty(one, engines.values())


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill_only", "decode_only"])
def test_where_one_role_is_missing_the_other_does_both(model, expected, role):
    with of_roles(model, only=role) as (one, engines, client):
        assert [answer(output) for output in client.generate(PROMPTS, PARAMS)] == expected
        assert not client.stats()["moved"]
        is_empty(one, engines.values())


LOSSES = [
    "the parcel is gone",
    "it cannot be written",
    "cut on the way",
    "larger than allowed",
    "other weights there",
    "no answer in time",
]
NUM_LOST = {"the parcel is gone": 0, "other weights there": 0}
"""Of four parcels: of these losses the tokens move alone, or the parcel arrives and is of no use."""


@pytest.mark.few
@pytest.mark.security
@pytest.mark.parametrize("loss", LOSSES)
def test_a_parcel_that_is_lost_or_unusable_costs_the_computation_and_nothing_else(model, expected, loss, monkeypatch):
    if loss == "the parcel is gone":
        monkeypatch.setattr(parcel_transfer, "MAX_WAITING_BYTES", 1000)
    elif loss == "cut on the way":
        whole = Parcel.to_bytes
        monkeypatch.setattr(Parcel, "to_bytes", lambda self: whole(self)[:-9])
    elif loss == "it cannot be written":
        monkeypatch.setattr(Parcel, "to_bytes", lambda self: 1 // 0)
    elif loss == "larger than allowed":
        monkeypatch.setattr("megatron_infer.coordinator.replica.max_parcel_bytes", lambda engine: 2000)
    elif loss == "no answer in time":
        monkeypatch.setattr(parcel_transfer, "TRANSFER_TIMEOUT_S", 0.3)
        monkeypatch.setattr(ParcelTransfer, "_begin", lambda self, *how: None)
    versions = {"d": 3} if loss == "other weights there" else {}
    with of_roles(model, p="prefill_only", d="decode_only", versions=versions) as (one, engines, client):
        same_tokens(client.generate(PROMPTS, PARAMS), expected)
        assert client.stats()["moved"] == 4 and computed(engines["d"]) > 0
        wait_for(lambda: parcels(client, ("d", "in"))[0][3] == NUM_LOST.get(loss, 4))
        is_empty(one, engines.values())


def same_tokens(outputs, expected) -> None:
    for output, (_, each) in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one[0] for one in each] and output.error is None


@pytest.mark.parametrize("lost", ["p", "d"])
def test_either_side_may_be_lost_at_any_time(model, expected, lost):
    with of_roles(model, p="prefill_only", d="decode_only", e="decode_only") as (one, _, client):
        futures = [client.submit(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
        peer = next(replica.peer for replica in one.core._registered() if replica.name == lost)
        time.sleep(0.02)
        one.core._send(peer, Refused("fenced", "cut off by the test"))
        one.core.unreachable(peer, "cut off by the test")
        same_tokens([future.result(60) for future in futures], expected)
        wait_for(lambda: len(client.stats()["replicas"]) == 3)
        one.core.check()


RANKS = {"take_in": RankFailure(1, "step 3", "it ended"), "hand_out": OtherRankFailed("rank 1: no memory", ranks=[1])}


@pytest.mark.long
@pytest.mark.parametrize("call", RANKS)
def test_a_move_that_fails_on_a_rank_costs_no_request(model, expected, call):
    """A rank that has died ends its engine, whose requests go elsewhere; one that could not write its part does not."""
    with of_roles(model, p="prefill_only", d="decode_only", e="decode_only") as (one, engines, client):

        def fail(*args, **more):
            raise RANKS[call]

        setattr(engines["d" if call == "take_in" else "p"], call, fail)
        same_tokens(client.generate(PROMPTS, PARAMS), expected)
        left = {"p", "e"} if call == "take_in" else {"p", "d", "e"}
        wait_for(lambda: {replica["name"] for replica in client.stats()["replicas"]} == left)
        is_empty(one, engines.values())


@pytest.mark.long
def test_an_engine_over_its_capacity_hands_requests_to_an_empty_one_before_it_evicts_them(model):
    """Alone it evicts, and computes tokens again."""
    small = {"prefix": "lru", "max_requests": 8, "buffer_size_gb": pool_of(model, 40)}
    params = [dataclasses.replace(PARAMS[i % 2], n=1, seed=i, max_tokens=120 + i) for i in range(8)]
    prompts = [[i + 1, *PROMPT] for i in range(len(params))]
    want = [answer(one) for one in make_engine(model).generate(prompts, params)]
    alone = make_engine(model, **small)
    same_tokens(alone.generate(prompts, params), want)
    engines = [make_engine(model, **small), make_engine(model, prefix="lru", max_requests=20)]
    with cluster(engines=engines) as (one, _, client):
        client.drain("r1")
        futures = [client.submit(*pair) for pair in zip(prompts, params, strict=True)]
        client.drain("r1", end=True)
        same_tokens([future.result(60) for future in futures], want)
        stats = client.stats()
        assert 1 <= stats["relieved"] <= len(params) and stats["moved"] == stats["relieved"] and not stats["resent"]
        assert recomputed(*engines) < recomputed(alone)
        is_empty(one, engines)


@pytest.mark.parametrize("more", [0, 1], ids=["all their blocks", "another block to come"])
def test_an_engine_is_short_only_if_a_request_may_need_another_block(model, more):
    engine = make_engine(model, max_requests=4, buffer_size_gb=pool_of(model, 4))
    room = engine.config.block_size_tokens - 2  # of a block, after a prompt of two tokens
    for index in range(4):
        params = SamplingParams(max_tokens=room + 1 + more, temperature=0.0, ignore_eos=True)
        engine.add_request([index + 1, 2], params, request_id=str(index))
    for _ in range(4):
        engine.step()
    assert engine.is_short_of_blocks == bool(more)
    done = [one for _ in range(99) if engine.has_unfinished() for one in engine.step() if one.finished]
    assert len(done) == 4


def test_an_engine_names_the_requests_that_are_cheaper_to_move_than_its_next_eviction(model):
    engine = make_engine(model, max_requests=8, buffer_size_gb=pool_of(model, 40))
    for index in range(4):
        params = SamplingParams(max_tokens=60, n=1 + index % 2, seed=index, ignore_eos=True)
        engine.add_request([index + 1, *PROMPT[: 10 * index]], params, request_id=str(index))
    for _ in range(4):
        engine.step()
    order = list(engine.next_to_move(0.0))
    assert sorted(order) == ["1", "2", "3"], "each once, and not the oldest"
    rates = [10 ** (-exponent / 4) for exponent in range(80)]
    found = [list(engine.next_to_move(s_per_byte)) for s_per_byte in rates]
    assert found[0] == [] and found[-1] == order
    assert any(0 < len(one) < 3 for one in found), "the smaller ones at less"
    assert all(one == [each for each in order if each in one] for one in found)


def recomputed(*engines) -> int:
    return sum(engine.stats().counters["recomputed_tokens"] for engine in engines)


def test_engines_that_move_no_memory_move_tokens():
    engines = [EchoEngine(step_s=0.002) for _ in range(2)]
    with cluster(engines=engines) as (one, _, client):
        client.drain("r1")
        params = SamplingParams(max_tokens=60)
        want = EchoEngine()
        want.add_request(PROMPT, params, request_id="a")
        futures = [client.submit(PROMPT, params) for _ in range(4)]
        wait_for(lambda: client.stats()["replicas"][0]["running"] == 4)
        client.drain("r1", end=True)
        client.drain("r0", move=True)
        tokens = {tuple(future.result(60).outputs[0].token_ids) for future in futures}
        assert client.stats()["moved"] == 4 and all(len(one) == 60 for one in tokens)
        one.core.check()


@contextlib.contextmanager
def transfers(*coordinators, key=None):
    """A ParcelTransfer next to each coordinator."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(ParcelTransfer(one, key))) for one in coordinators]
        for one in made:
            one.start()
        yield made


@contextlib.contextmanager
def sockets():
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(0)


def offered(model, one, **about):
    """(the place of the parcel of a request that has begun, the parcel)."""
    engine = make_engine(model)
    engine.add_request(PROMPT, PARAMS[0], request_id="a")
    engine.step()
    parcel = engine.hand_out("a")
    return ParcelPlace(one.address, one.offer(parcel, **about)), parcel


ANYWHERE = "tcp://127.0.0.1:1"


@pytest.mark.security
def test_a_stranger_gets_no_parcel_and_nonsense_is_ignored(model):
    """Without the key nothing is answered; with it, an unknown id and messages of any form."""
    key = secrets.token_bytes(32)
    with transfers(ANYWHERE, ANYWHERE, key=key) as (one, other), sockets() as context:
        place, parcel = offered(model, one)
        with contextlib.closing(context.socket(zmq.DEALER)) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(one.address)
            stranger.send_multipart([b"get", place.id.encode(), b"0"])
            assert not stranger.poll(500), "a parcel went to one without the key"
        with contextlib.closing(context.socket(zmq.DEALER)) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            access.protect_connection(peer, key)
            peer.connect(one.address)
            for frames in ([b""], [b"get"], [b"get", b"\xff", b"-1"], [b"more"], [b"done"], [b"get", b"", b"9" * 99]):
                peer.send_multipart(frames)
        assert other.fetch(ParcelPlace(one.address, "0" * 32), num_published=0, max_bytes=1 << 30).result(10) is None
        assert other.fetch(place, num_published=0, max_bytes=100).result(10) is None
        assert other.fetch(ParcelPlace("nonsense", "x"), num_published=0, max_bytes=1 << 30).result(10) is None
        assert one.num_waiting == 1, "it waits for the next attempt"
        fetched = other.fetch(place, num_published=0, max_bytes=1 << 30).result(10)
        assert fetched.manifest == parcel.manifest
        wait_for(lambda: not one.num_waiting)


def test_one_slow_parcel_does_not_end_moves(model, monkeypatch):
    """Without roles only moves measure what a move takes."""
    monkeypatch.setattr(parcel_transfer, "PART_BYTES", 1024)
    with transfers(ANYWHERE, ANYWHERE) as (one, other):
        before, (place, _) = one.s_per_byte, offered(model, one, copy_s=60.0)
        assert other.fetch(place, num_published=0, max_bytes=1 << 30).result(10) is not None
        wait_for(lambda: one.s_per_byte != before)
        assert before < one.s_per_byte < 2 * before


@pytest.mark.security
def test_what_a_sender_makes_up_is_a_lost_parcel(model):
    """Sizes, bytes and addresses of any kind: the fetch has no parcel, and others are fetched after it."""
    key = secrets.token_bytes(32)
    null = b'{"__metadata__":null}'
    contents = [b"no parcel", (len(null)).to_bytes(8, "little") + null]
    replies = [[b"size", b"9" * 5000], [b"size", b"0"], [b"size", b"\xb2"], [b""], [b"gone", b""]]
    with transfers(ANYWHERE, key=key) as (one,), sockets() as context:
        sender = context.socket(zmq.ROUTER)
        access.protect_listener(sender, key)
        check = access.PeerCheck(context, key)
        sender.bind("tcp://127.0.0.1:*")
        address = sender.getsockopt_string(zmq.LAST_ENDPOINT)
        for messages in [[reply] for reply in replies] + [
            [[b"size", str(len(content)).encode()], [b"part", content]] for content in contents
        ]:
            fetching = one.fetch(ParcelPlace(address, "x"), num_published=0, max_bytes=1 << 20)
            while not sender.poll(10):
                check.answer()
            peer = sender.recv_multipart()[0]
            for message in messages:
                sender.send_multipart([peer, *message])
            assert fetching.result(10) is None, messages
            while sender.poll(50):
                sender.recv_multipart()
        check.socket.close(0)
        sender.close(0)
        for strange in ("inproc://zeromq.zap.01", "udp://127.0.0.1:9", "nonsense", "ipc:///run/some.sock"):
            assert one.fetch(ParcelPlace(strange, "x"), num_published=0, max_bytes=1 << 20).result(10) is None
        began = time.monotonic()
        assert one.fetch(ParcelPlace(address, "x"), num_published=0, max_bytes=1 << 20).result(10) is None
        assert time.monotonic() - began < 10, "the sender is gone, and is not waited for as one that may answer"
        place, _ = offered(model, one)
        assert one.fetch(place, num_published=0, max_bytes=1 << 30).result(10).num_bytes


@pytest.mark.security
def test_an_address_that_is_a_strangers_learns_neither_key_nor_request(monkeypatch):
    """It gets a greeting and a key pair of this connection; what proves the key is sent to who has proved it."""
    monkeypatch.setattr(parcel_transfer, "TRANSFER_TIMEOUT_S", 8.0)
    key, heard = secrets.token_bytes(32), bytearray()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)
    with transfers(ANYWHERE, key=key) as (one,):
        with socket.create_server(("127.0.0.1", free_port())) as listening:
            address = "tcp://{}:{}".format(*listening.getsockname())
            fetching = one.fetch(ParcelPlace(address, "the id"), num_published=0, max_bytes=1 << 20)
            connection = listening.accept()[0]
            with connection:
                connection.sendall(greeting)
                connection.settimeout(60)
                while len(heard) < 64 + 202 and (more := connection.recv(1 << 16)):  # a greeting and a hello
                    heard += more
                connection.sendall(b"\x04\xa8" + b"\x07WELCOME" + bytes(160))  # boxed with no key that fits
                while more := connection.recv(1 << 16):
                    heard += more
        assert fetching.result(60) is None
        proof = z85.decode(access._curve_pair(key, b"peer")[0])
        assert b"the id" not in heard and proof not in heard and len(heard) == 64 + 202


@pytest.mark.security
def test_a_parcel_has_one_copy_however_often_it_is_asked_for(model):
    """The last to ask has it; the one before is told at once."""
    with transfers(ANYWHERE) as (one,), sockets() as context:
        (place, _), others = offered(model, one), []
        for _ in range(8):
            others.append(context.socket(zmq.DEALER))
            others[-1].connect(one.address)
            others[-1].send_multipart([b"get", place.id.encode(), b"0"])
            assert others[-1].poll(60_000) and others[-1].recv_multipart()[0] == b"size"
            assert others[-1].poll(60_000) and others[-1].recv_multipart()[0] == b"part"
        for other in others[:-1]:
            assert other.poll(60_000) and other.recv_multipart() == [b"gone", b""]
        others[-1].send(b"done")
        wait_for(lambda: not one.num_waiting)


def test_a_receiver_that_cannot_be_sent_to_costs_others_nothing(model, monkeypatch):
    monkeypatch.setattr(parcel_transfer, "TRANSFER_TIMEOUT_S", 5.0)
    with transfers(ANYWHERE) as (one,):
        place, _ = offered(model, one)
        with monkeypatch.context() as patch:
            tried = []
            patch.setattr(one, "_send", lambda peer, *message: tried.append(one._sending.pop(peer, None)))
            one.fetch(place, num_published=0, max_bytes=1 << 30)
            wait_for(lambda: tried)
        assert one.fetch(place, num_published=0, max_bytes=1 << 30).result(10) is not None


@pytest.mark.security
def test_a_check_of_keys_survives_a_peer_within_the_process_that_speaks_otherwise():
    with sockets() as context:
        check = access.PeerCheck(context, secrets.token_bytes(32))
        with contextlib.closing(context.socket(zmq.DEALER)) as peer:
            peer.connect("inproc://zeromq.zap.01")
            for frames in ([b"get", b"x", b"0"], [b""], [b"", b"1.0"]):
                peer.send_multipart(frames)
            check.answer()
            peer.send_multipart([b"", b"1.0", b"7", b"", b"", b"", b"CURVE", b"x" * 32])
            check.answer()
            assert peer.recv_multipart()[:4] == [b"", b"1.0", b"7", b"400"]
        check.socket.close(0)


def test_parcels_are_next_to_any_kind_of_coordinator_and_leave_nothing(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = secrets.token_hex(4)
    for coordinator_address in ("ipc://sock", f"ipc://{tmp_path}/sock", f"ipc://@{name}"):
        with transfers(coordinator_address, coordinator_address) as (one, other):
            place, _ = offered(model, one)
            monkeypatch.chdir("/")
            assert other.fetch(place, num_published=0, max_bytes=1 << 30).result(10) is not None, coordinator_address
            monkeypatch.chdir(tmp_path)
        assert not list(tmp_path.iterdir()), "the socket's file is left"
    with transfers(f"ipc://@{name}", f"ipc://@other{name}") as (one, stranger):
        place, _ = offered(model, stranger)
        assert one.fetch(place, num_published=0, max_bytes=1 << 30).result(10) is None, "not of this coordinator"
        assert stranger.num_waiting == 1
    assert not access.is_private(f"ipc://@{name}"), "whoever is on the machine reaches it"
    threads = threading.active_count()
    for wrong in ({"coordinator": "tcp://no.such.host.invalid:5757"}, {"role": "nope"}):
        with pytest.raises(ConfigError, match=r"no way to the coordinator|role 'nope'; one of prefill_and_decode"):
            Replica(make_engine(model), **{"coordinator": f"ipc://{tmp_path}/c"} | wrong)
    never_run = Replica(make_engine(model), f"ipc://{tmp_path}/c")
    assert threading.active_count() == threads and not list(tmp_path.iterdir()), "it listens, and nobody ends it"
    del never_run


@pytest.mark.long
def test_a_request_that_comes_with_its_memory_waits_for_its_grammar_too(model, expected):
    with of_roles(model, p="prefill_only", d="decode_only") as (_, engines, client):
        preparing, taken = [], []

        def prepare(params, caller):
            preparing.append(Future())
            threading.Timer(0.2, preparing[-1].set_result, (None,)).start()
            return preparing[-1]

        def take_in(*args, **more):
            taken.append(bool(preparing) and all(one.done() for one in preparing))
            return whole(*args, **more)

        whole = engines["d"].take_in
        engines["d"].prepare, engines["d"].take_in = prepare, take_in
        assert answer(client.generate(PROMPTS[:1], PARAMS[:1])[0]) == expected[0]
        assert taken == [True]
