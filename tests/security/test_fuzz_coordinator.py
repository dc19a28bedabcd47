"""The coordinator's wire: damaged messages of strangers, clients and replicas end no other's requests."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import msgspec
import pytest
from coordinator_case import RawPeer, cluster, replica, wait_for
from echo import EchoEngine, echo_tokens
from mutations import Rounds, altered, damaged, no_errors_logged, rounds, shown
from server_case import post, serving

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.schema import Failure, Piece, ids_to_bytes
from megatron_infer.outputs.token_outputs import TokenValues

__all__ = ["rounds"]

pytestmark = pytest.mark.security
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
IDS = ids_to_bytes([1, 2, 3])
PARAMS = {"n": 1, "max_tokens": 8, "temperature": 0.0, "stop": ["x"], "logit_bias": {"5": 1.0}, "priority": 0}
HELLO = protocol.Hello(protocol.SCHEMA, "client", "fuzz", b"n")
KEPT = protocol.Kept(IDS, 3, -1.0, None, None)
FROM_CLIENTS: tuple[protocol.Message, ...] = (
    HELLO,
    protocol.Ping(),
    protocol.Submit(1, IDS, None, "", PARAMS, None, True, "caller", "call"),
    protocol.Submit(2, None, "a text", "salt", PARAMS, 5, False),
    protocol.Submit(3, IDS, None, "", PARAMS, 7, True, kept=[KEPT]),
    protocol.Abort(1),
    protocol.Control(9, "reset_prefix_cache", {}, 0.1),
    protocol.Query(10),
    protocol.Drain(11, "nobody", True),
)
LIMITS = {"max_sequence_length": 2048, "vocab_size": 1000, "num_blocks": 64}
NOW = protocol.EngineNow(root=b"root")
SIZES = {"block_size": 16, "capacity": 4, "model": "tiny", "policy": "first_prefix_block", "alpha": 0.5}
REGISTER = protocol.Register(1, protocol.EngineInfo(**SIZES, limits=LIMITS, now=NOW))
FIGURES = {
    "born": 1.0,
    "state": "running",
    "ended": {"stop": 1},
    "ttft": {"bounds": [1.0], "counts": [1, 0], "total": 0.5},
    "beside": [{"name": "a", "kind": "gauge", "help": "", "value": 1.0, "labels": [["a", "b"]]}],
    **dict.fromkeys(
        (
            "weight_version",
            "num_waiting",
            "num_running",
            "num_paused",
            "capacity",
            "blocks_used",
            "blocks_cached",
            "blocks_paused",
            "blocks_free",
        ),
        0,
    ),
}
FROM_REPLICAS: tuple[protocol.Message, ...] = (
    protocol.Beat(1, NOW, 4, 0, 0.0, {"figures": FIGURES}),
    protocol.PrefixNews(1, b"root", True, b"", bytes(64)),
    protocol.Done(1, 1, protocol.Answer(ok=True, value={"a": 1})),
    protocol.Pong(),
    protocol.HandedOut(1, 1, "parcel"),
    protocol.EvictsNext([1, 2], 1),
)
ADAPTERS = {"adapter_changes": {"x": (1.0, {"name": "x", "path": "p"}), "y": (2.0, None)}, "undone": ["change"]}


class SpeakingPeer(RawPeer):
    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def say(self, message: protocol.Message) -> None:
        self.send(*protocol.frames_of([protocol.encode(message)]))

    def read(self, timeout_ms: int = 0) -> list[protocol.Message]:
        """What has come."""
        found: list[protocol.Message] = []
        while self.socket.poll(timeout_ms):
            found += map(protocol.decode, protocol.messages_of(self.socket.recv_multipart()))
            timeout_ms = 0
        return found

    def enter(self, role: str, rng: random.Random) -> int:
        """Say hello -> the incarnation."""
        self.say(msgspec.structs.replace(HELLO, role=role, nonce=rng.randbytes(8)))
        for _ in range(100):
            for message in self.read(100):
                if isinstance(message, protocol.Welcome):
                    return message.incarnation
        raise AssertionError("no welcome")


def wire_of(message: protocol.Message, rng: random.Random) -> list[bytes]:
    """Frames of a message that is damaged in its fields or in its bytes."""
    data = protocol.encode(message)
    if rng.random() < 0.7 and message.__struct_fields__:
        with contextlib.suppress(OverflowError, msgspec.MsgspecError):
            fields = dict(enumerate(msgspec.msgpack.decode(data)[1:]))
            for _ in range(rng.randrange(1, 3)):
                name = rng.choice(list(fields))
                fields[name] = altered(fields[name], rng)
            data = msgspec.msgpack.encode([type(message).__name__.lower(), *fields.values()])
    else:
        data = damaged(data, rng)
    frames = protocol.frames_of([data])
    if rng.random() < 0.1:
        frames.insert(rng.randrange(len(frames) + 1), bytes(rng.choice((0, 3, protocol.MAX_FRAME))))
    return frames


def is_served(client: Any, count: int = 1) -> None:
    outputs = client.generate([[i + 1, 2] for i in range(count)], GREEDY)
    assert [one.outputs[0].token_ids for one in outputs] == [echo_tokens([i + 1, 2], 8) for i in range(count)]


def test_damaged_messages_of_strangers_and_clients_change_nothing_for_others(rounds: Rounds) -> None:
    with no_errors_logged(), cluster(2, timeout_s=20.0) as (one, replicas, client):
        for rng in rounds(long=12):
            with SpeakingPeer(one.address) as peer:
                if rng.random() < 0.8:
                    peer.enter("client", rng)
                for _ in range(60):
                    frames = wire_of(rng.choice(FROM_CLIENTS), rng)
                    with shown(frames):
                        peer.send(*frames)
                peer.read(1)
                is_served(client)
        assert not any(replica.failure for replica in replicas)
        wait_for(lambda: client.stats()["clients"] == 1)
        one.core.check()
        assert [state["running"] + state["waiting"] for state in client.stats()["replicas"]] == [0, 0]


def test_damaged_messages_of_a_replica_cost_its_own_requests_at_most(rounds: Rounds) -> None:
    """It holds the key: its answers count. Those that make no sense do not reach other requests, nor end a client."""
    with (
        no_errors_logged(),
        serving(EchoEngine(max_requests=4)) as case,
        InferenceClient(case.coordinator.address) as client,
    ):
        for rng in rounds(long=5):
            with SpeakingPeer(case.coordinator.address) as peer:
                incarnation = peer.enter("replica", rng)
                register = msgspec.structs.replace(REGISTER, incarnation=incarnation)
                told = msgspec.structs.replace(register, **ADAPTERS)
                peer.send(*wire_of(told, rng)) if rng.random() < 0.2 else peer.say(register)
                futures = [client.submit([i + 1, 2], GREEDY) for i in range(8)]
                for _ in range(12):
                    for message in peer.read(1):
                        if isinstance(message, protocol.Run):
                            for frames in answers(message, incarnation, rng):
                                with shown(frames):
                                    peer.send(*frames)
                    said = rng.choice(FROM_REPLICAS)
                    if hasattr(said, "incarnation"):
                        said = msgspec.structs.replace(said, incarnation=incarnation)
                    peer.send(*wire_of(said, rng))
                if rng.random() < 0.2:  # time for the server to read the report
                    time.sleep(0.6)
                    assert {case.http.get(path).status_code for path in ("/health", "/v1/status", "/metrics")} == {200}
            for future in futures:
                with contextlib.suppress(InferenceError):
                    future.result(20)
            wait_for(lambda: len(client.stats()["replicas"]) == 1)
            is_served(client)
        assert post(case, "/v1/completions", prompt=[1, 2], max_tokens=2).status_code == 200
        assert not any(replica.failure for replica in case.replicas)
        case.coordinator.core.check()


def answers(run: protocol.Run, incarnation: int, rng: random.Random) -> list[list[bytes]]:
    """Outputs of a request, damaged."""
    values = TokenValues("float32", [], bytes(4))
    piece = Piece(
        0, 0, IDS[:4], "a", None, None, -1.0, [[(1, -0.5, 1, "a")]], [(0, 1, 1, 0)], {"sampled_logprobs": values}
    )
    output = protocol.Output(
        run.number, incarnation, [piece], False, prompt=IDS, prompt_logprobs=[None, [(1, 0.0, 1, "")]]
    )
    last = msgspec.structs.replace(
        output, pieces=[msgspec.structs.replace(piece, offset=1)], finished=True, pooled=bytes(8)
    )
    failed = protocol.Output(run.number, incarnation, [], True, error=Failure("InferenceError", "why"))
    moved = protocol.HandedOut(run.number, incarnation, "parcel")
    first = [protocol.frames_of([protocol.encode(rng.choice((output, moved)))])] if rng.random() < 0.5 else []
    return [*first, *(wire_of(rng.choice((output, last, failed, moved)), rng) for _ in range(rng.randrange(4)))]


# ---------------------------------------------------------------------- what was found


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": [Piece(0, 0, IDS[:4], "a", token_outputs={"support": TokenValues("x", [], b"")})]},
        {"times": protocol.StageTimes(float("nan"))},
        {"times": protocol.StageTimes(0.0, scheduled=1e300)},
    ],
)
def test_output_that_makes_no_sense_fails_its_request_and_not_the_client(changes: dict[str, Any]) -> None:
    """One of these once ended the connection of the HTTP process for good."""
    with no_errors_logged(), cluster(0, timeout_s=20.0) as (one, _, client):
        with SpeakingPeer(one.address) as peer:
            incarnation = peer.enter("replica", random.Random(0))
            peer.say(msgspec.structs.replace(REGISTER, incarnation=incarnation))
            future = client.submit([1, 2], GREEDY)
            run = next(one for _ in range(100) for one in peer.read(100) if isinstance(one, protocol.Run))
            output = protocol.Output(run.number, incarnation, [], False)
            peer.say(msgspec.structs.replace(output, **changes))
            with pytest.raises(protocol.BadMessage, match="makes no sense"):
                future.result(10)
            cancel = next(one for _ in range(100) for one in peer.read(100) if isinstance(one, protocol.Cancel))
            assert cancel.number == run.number
        with replica(one.address):
            is_served(client)


def test_figures_of_a_replica_that_cannot_be_read_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as case, SpeakingPeer(case.coordinator.address) as peer:
        incarnation = peer.enter("replica", random.Random(0))
        peer.say(msgspec.structs.replace(REGISTER, incarnation=incarnation))
        for figures in ({"a": 1}, {**FIGURES, "ended": [1]}, {**FIGURES, "ttft": {"bounds": 1}}):
            peer.say(protocol.Beat(incarnation, NOW, 4, 0, 0.0, {"figures": figures}))
            wait_for(lambda: len(case.http.get("/v1/status").json()["replicas"]) == 2)
        wait_for(lambda: "cannot be read" in caplog.text)
        assert case.http.get("/metrics").status_code == 200
    assert caplog.text.count("cannot be read") == 1


def deep(message: protocol.Message, levels: int) -> bytes:
    """The message with a list of so many levels in the place of "deep"."""
    data, mark = protocol.encode(message), msgspec.msgpack.encode("deep")
    assert data.count(mark) == 1
    return data.replace(mark, b"\x91" * levels + b"\x01")


def test_nesting_that_could_be_read_and_not_passed_on_is_refused_and_the_coordinator_goes_on() -> None:
    """A few levels below the limit of the stack once ended the coordinator."""
    levels = (*range(900, 1000), 3_000, 30_000)
    with (
        cluster(1, timeout_s=20.0) as (one, replicas, client),
        SpeakingPeer(one.address) as peer,
        SpeakingPeer(one.address) as of,
    ):
        peer.enter("client", random.Random(0))
        incarnation = of.enter("replica", random.Random(1))
        of.say(msgspec.structs.replace(REGISTER, incarnation=incarnation))
        beat = protocol.Beat(incarnation, NOW, 4, 0, 0.0, {"figures": "deep"})
        wait_for(lambda: len(client.stats()["replicas"]) == 2)
        for count in levels:
            submit = protocol.Submit(count, IDS, None, "", {"metadata": "deep"}, None, False)
            peer.send(*protocol.frames_of([deep(submit, count)]))
            of.send(*protocol.frames_of([deep(beat, count)]))
            client.stats()
        assert any(isinstance(message, protocol.Refused) for message in peer.read(100))
        of.say(protocol.Goodbye())
        wait_for(lambda: len(client.stats()["replicas"]) == 1)
        is_served(client)
        assert not replicas[0].failure


def test_an_accepted_request_is_sent_to_a_replica_though_it_grows_beyond_the_limit_of_its_client() -> None:
    with cluster(0, max_message=1 << 12, timeout_s=20.0) as (one, _, client), SpeakingPeer(one.address) as peer:
        incarnation = peer.enter("replica", random.Random(0))
        peer.say(msgspec.structs.replace(REGISTER, incarnation=incarnation))
        wait_for(lambda: client.stats()["replicas"])
        future = client.submit(list(range(920)), SamplingParams(max_tokens=40, temperature=0.0))
        run = next(one for _ in range(100) for one in peer.read(100) if isinstance(one, protocol.Run))
        tokens = echo_tokens(list(range(920)), 40)
        piece = Piece(0, 0, ids_to_bytes(tokens[:36]), "")
        peer.say(protocol.Output(run.number, incarnation, [piece], False))
        peer.say(protocol.Goodbye())
        with replica(one.address):
            assert future.result(30).outputs[0].token_ids == tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"info": msgspec.structs.replace(REGISTER.info, capacity=2**64 - 1)},
        {"info": msgspec.structs.replace(REGISTER.info, block_size=2**62)},
        {"info": msgspec.structs.replace(REGISTER.info, limits={"vocab_size": 9})},
        {"adapter_changes": {"x": (1.0, {"path": "x"})}},
        {"adapter_changes": {"x": (float("nan"), None)}},
        {"weights": {"now": [float("inf"), []], "before": None, "is_open": False}},
    ],
    ids=[
        "capacity",
        "block size",
        "limits",
        "an adapter without a name",
        "a stamp that is no number",
        "newest weights",
    ],
)
def test_replica_that_claims_the_impossible_is_refused_and_the_coordinator_goes_on(changes: dict[str, Any]) -> None:
    with cluster(1, timeout_s=20.0) as (one, _, client), SpeakingPeer(one.address) as peer:
        incarnation = peer.enter("replica", random.Random(0))
        peer.say(msgspec.structs.replace(REGISTER, incarnation=incarnation, **changes))
        refused = next(one for _ in range(100) for one in peer.read(100) if isinstance(one, protocol.Refused))
        assert "cannot register" in refused.message and len(client.stats()["replicas"]) == 1
        is_served(client)
