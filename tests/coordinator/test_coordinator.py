"""Clients, coordinator and replicas over sockets: outputs, streams, aborts, limits, controls, authentication."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest
import zmq
from coordinator_case import RawPeer, cluster, coordinator, replica, wait_for
from echo import EchoEngine, echo_tokens

from megatron_infer.cli.main import main
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import access, protocol
from megatron_infer.coordinator.client import AsyncInferenceClient, InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions
from megatron_infer.errors import ConfigError, InvalidPrompt, RequestError
from megatron_infer.outputs.request_output import GenerationError

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def prompts(count, length=40):
    return [list(range(i, i + length)) for i in range(count)]


def tokens_of(output, sample=0):
    return output.outputs[sample].token_ids


def test_answers_come_in_order_and_are_the_engine_s():
    with cluster(3) as (one, _, client):
        outputs = client.generate(prompts(50), GREEDY)
        assert [tokens_of(output) for output in outputs] == [echo_tokens(prompt, 8) for prompt in prompts(50)]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        assert outputs[7].prompt_token_ids == prompts(50)[7] and outputs[7].finished
        used = {one_replica["name"] for one_replica in client.stats()["replicas"] if one_replica["cached_blocks"]}
        assert used == {"r0", "r1", "r2"}
        assert (client.stats()["finished"], client.stats()["waiting"]) == (50, 0)
        one.core.check()


def test_samples_and_seeds_reach_the_engine_and_unseeded_requests_differ():
    with cluster(2) as (_, _, client):
        params = SamplingParams(max_tokens=5, n=3, seed=7)
        output = client.generate([[1, 2, 3]], params)[0]
        assert [tokens_of(output, i) for i in range(3)] == [
            echo_tokens([1, 2, 3], 5, seed=7, index=i) for i in range(3)
        ]
        unseeded = client.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=5))
        assert len({tuple(tokens_of(one)) for one in unseeded}) == 4


def test_stream_grows_token_by_token_and_ends_complete():
    with cluster(1, engines=[EchoEngine(step_s=0.01)]) as (_, _, client):
        seen = [
            tokens_of(output) for output in client.stream([5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0))
        ]
        expected = echo_tokens([5, 6, 7], 12)
        assert all(expected[: len(tokens)] == tokens for tokens in seen) and seen[-1] == expected
        assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen}) and len(seen) >= 6


def test_abort_ends_a_request_with_its_tokens_so_far_in_every_state():
    slow = EchoEngine(step_s=0.02, max_requests=4)
    with cluster(1, engines=[slow]) as (one, _, client):
        params = SamplingParams(max_tokens=1000, temperature=0.0)
        running = client.submit([1, 2], params)
        others = [client.submit([3, i], params) for i in range(9)]  # 5 fit on the replica
        wait_for(lambda: client.stats()["waiting"] == 5)
        client.abort(others[-1])
        output = others[-1].result(60)
        assert (output.outputs[0].finish_reason, tokens_of(output)) == ("abort", [])
        wait_for(lambda: slow.context.num_free_rows == 0)
        time.sleep(0.1)
        client.abort(running)
        output = running.result(60)
        count = len(tokens_of(output))
        assert output.outputs[0].finish_reason == "abort" and tokens_of(output) == echo_tokens([1, 2], count)
        assert count > 0
        for other in others:
            client.abort(other)
        wait_for(lambda: not slow.has_unfinished())
        one.core.check()


def test_leaving_a_stream_and_closing_the_client_abort():
    engine = EchoEngine(step_s=0.01)
    with cluster(1, engines=[engine]) as (one, _, client):
        params = SamplingParams(max_tokens=5000 - 10, temperature=0.0)
        for _ in client.stream([1, 2, 3], params):
            assert engine.has_unfinished()
            break
        wait_for(lambda: not engine.has_unfinished())
        with InferenceClient(one.address) as second:
            future = second.submit([4], params)
            wait_for(engine.has_unfinished)
        with pytest.raises(protocol.ConnectionLost, match="closed"):
            future.result(1)
        wait_for(lambda: not engine.has_unfinished())


class PreparingEngine(EchoEngine):
    """What a request needs is there after 0.2 s; where it draws 6 tokens, once `held` is fulfilled."""

    def __init__(self):
        super().__init__(step_s=0.01)
        self.log, self.held = [], Future()

    def prepare(self, params, caller=0):
        if params.max_tokens > 6:
            return None
        self.log.append("prepare")
        future = self.held if params.max_tokens == 6 else Future()
        if future is not self.held:
            threading.Timer(0.2, future.set_result, (None,)).start()
        return future

    def add_request(self, *args, **options):
        self.log.append("begin")
        return super().add_request(*args, **options)

    def step(self):
        self.log.append("step")
        return super().step()


def test_step_waits_a_moment_for_the_first_request_that_a_caller_has_prepared(monkeypatch):
    engine = PreparingEngine()

    def log_of(client, num_tokens):
        engine.log.clear()
        future = client.submit([3], SamplingParams(max_tokens=num_tokens))
        wait_for(lambda: "begin" in engine.log or engine.log.count("step") > 30)
        return future, engine.log[engine.log.index("prepare") + 1 :]

    with cluster(1, engines=[engine]) as (_, _, client):
        running = client.submit([9], SamplingParams(max_tokens=5000))
        wait_for(lambda: "step" in engine.log)
        monkeypatch.setattr("megatron_infer.coordinator.replica.BRIEF_S", 30.0)
        first, log = log_of(client, 5)
        assert log[0] == "begin" and first.result(60)
        monkeypatch.setattr("megatron_infer.coordinator.replica.BRIEF_S", 0.0)
        held, log = log_of(client, 6)
        assert "begin" not in log
        monkeypatch.setattr("megatron_infer.coordinator.replica.BRIEF_S", 30.0)
        second, log = log_of(client, 5)
        assert log[0] == "step", "another request of the caller is still being prepared"
        engine.held.set_result(None)
        assert second.result(60) and held.result(60)
        client.abort(running)


def test_full_queue_refuses_with_a_reason_and_accepts_again_later():
    engine = EchoEngine(step_s=0.01, max_requests=2)
    with cluster(1, engines=[engine], max_queue=5) as (_, _, client):
        params = SamplingParams(max_tokens=20, temperature=0.0)
        futures = [client.submit([i], params) for i in range(20)]
        refused = [future for future in futures if isinstance(future.exception(60), protocol.Overloaded)]
        answered = [future for future in futures if future not in refused]
        assert len(answered) == 8  # 3 on the replica, 5 in the queue
        assert "limit is 5 (max_queue)" in str(refused[0].exception())
        assert [tokens_of(future.result()) for future in answered] == [echo_tokens([i], 20) for i in range(8)]
        assert tokens_of(client.generate([[99]], params)[0]) == echo_tokens([99], 20)


def test_requests_wait_for_the_first_replica():
    with coordinator() as one, InferenceClient(one.address) as client:
        future = client.submit([1, 2, 3], GREEDY)
        time.sleep(0.1)
        assert not future.done()
        with replica(one.address):
            assert tokens_of(future.result(60)) == echo_tokens([1, 2, 3], 8)


def test_refusal_of_an_engine_reaches_its_caller_alone():
    with cluster(1) as (_, _, client):
        with pytest.raises(InvalidPrompt, match="takes token ids"):
            client.generate(["text"], GREEDY)
        with pytest.raises(RequestError, match="do not fit"):
            client.generate([[1]], SamplingParams(max_tokens=10**6))
        with pytest.raises(InvalidPrompt, match="token ids"):
            client.generate([["a"]], GREEDY)
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)


def test_prompts_before_one_that_is_refused_are_aborted():
    engine = EchoEngine(step_s=0.01)
    with cluster(1, engines=[engine]) as (_, _, client):
        with pytest.raises(InvalidPrompt, match="token ids"):
            client.generate([[1], ["a"]], SamplingParams(max_tokens=4000, temperature=0.0))
        wait_for(lambda: client.stats()["submitted"] == 1)
        wait_for(lambda: not engine.has_unfinished() and not client.stats()["waiting"], timeout_s=10.0)


def test_draining_replica_finishes_its_requests_and_gets_no_new_ones():
    engines = [EchoEngine(step_s=0.01), EchoEngine(step_s=0.01)]
    with cluster(2, engines=engines) as (_, replicas, client):
        params = SamplingParams(max_tokens=30, temperature=0.0)
        futures = [client.submit([i], params) for i in range(8)]
        wait_for(lambda: engines[0].has_unfinished() and engines[1].has_unfinished())
        replicas[0].drain()
        later = [client.submit([100 + i], params) for i in range(4)]
        assert [tokens_of(future.result(60)) for future in futures] == [echo_tokens([i], 30) for i in range(8)]
        assert [tokens_of(future.result(60)) for future in later] == [echo_tokens([100 + i], 30) for i in range(4)]
        replicas[0].thread.join(60)
        stats = client.stats()
        assert (stats["resent"], stats["replicas_lost"]) == (0, 0)
        assert [one["name"] for one in stats["replicas"]] == ["r1"]


def test_cached_prefixes_draw_requests_until_they_are_reset():
    with cluster(2, policy="longest_prefix", alpha=0.9) as (_, _, client):
        shared = list(range(100, 180))
        first = client.generate([[*shared, 1]], GREEDY)[0]
        assert first.num_cached_tokens == 0
        wait_for(lambda: sum(one["cached_blocks"] for one in client.stats()["replicas"]) == 5)
        for i in range(6):
            assert client.generate([[*shared, 2 + i]], GREEDY)[0].num_cached_tokens == 80
        client.reset_prefix_cache()
        wait_for(lambda: sum(one["cached_blocks"] for one in client.stats()["replicas"]) == 0)
        assert client.generate([[*shared, 50]], GREEDY)[0].num_cached_tokens == 0
        client.set_weight_version(3)
        wait_for(lambda: all(one["weight_version"] == 3 for one in client.stats()["replicas"]))
        assert sum(one["cached_blocks"] for one in client.stats()["replicas"]) == 0
        assert client.generate([[*shared, 51]], GREEDY)[0].num_cached_tokens == 0


def test_coordinator_without_a_policy_takes_that_of_the_first_replica():
    with cluster(1, engines=[EchoEngine(policy="round_robin", alpha=0.25)]) as (_, _, client):
        assert (client.stats()["policy"], client.stats()["alpha"]) == ("round_robin", 0.25)


# ---------------------------------------------------------------------- controls


class StuckEngine(EchoEngine):
    """Its first step blocks until `wake`."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = threading.Event()

    def step(self):
        self.wake.wait(30)
        return super().step()


class StayingEngine(EchoEngine):
    suspend = None


def test_every_replica_answers_a_control_and_one_that_joins_later_is_paused_too():
    with cluster(2, engines=[StayingEngine(), StayingEngine()]) as (one, _, client):
        answers = client.pause()
        assert {name: answer.ok for name, answer in answers.items()} == {"r0": True, "r1": True}
        assert [r["state"] for r in client.stats()["replicas"]] == ["paused"] * 2, "known before the answers are"
        future = client.submit([1, 2], GREEDY)
        with replica(one.address, name="late"):
            wait_for(lambda: [r["state"] for r in client.stats()["replicas"]] == ["paused"] * 3)
            time.sleep(0.1)
            assert not future.done()
            client.unpause()
            assert tokens_of(future.result(60)) == echo_tokens([1, 2], 8)
        with pytest.raises(protocol.ControlFailed, match="r0: unpause\\(\\) while the engine is RUNNING") as caught:
            client.unpause()
        assert set(caught.value.results) >= {"r0", "r1"}
        with pytest.raises(protocol.ControlFailed, match="StayingEngine has no suspend"):
            client.suspend()
        with pytest.raises(ConfigError, match="unknown command 'shutdown'"):
            client.control("shutdown")


def test_unresponsive_replica_fails_a_control_at_its_deadline_and_does_not_execute_it_later():
    stuck = StuckEngine()
    with cluster(2, engines=[stuck, EchoEngine()], policy="round_robin") as (_, _, client):
        future = client.submit([1], GREEDY)
        wait_for(stuck.has_unfinished)
        began = time.monotonic()
        answers = client.control("pause", timeout_s=0.4, check=False)
        assert 0.3 < time.monotonic() - began < 15
        assert answers["r1"].ok and not answers["r0"].ok
        assert (answers["r0"].kind, answers["r0"].message) == ("TransitionTimeout", "no answer to pause within 0.4 s")
        stuck.wake.set()
        assert tokens_of(future.result(60)) == echo_tokens([1], 8)
        assert stuck.state == "running"


def test_engine_stuck_in_a_step_is_dead_though_its_heartbeat_goes_on():
    stuck = StuckEngine()
    with cluster(2, engines=[stuck, EchoEngine()], policy="round_robin", step_timeout_s=0.5) as (_, _, client):
        future = client.submit([1], GREEDY)
        wait_for(stuck.has_unfinished)
        assert tokens_of(future.result(60)) == echo_tokens([1], 8)
        assert (client.stats()["resent"], client.stats()["replicas_lost"]) == (1, 1)
        stuck.wake.set()
        wait_for(lambda: len(client.stats()["replicas"]) == 2)  # it may connect again
        assert tokens_of(client.generate([[2]], GREEDY)[0]) == echo_tokens([2], 8)


@pytest.mark.long
def test_replica_whose_engine_is_busy_for_long_is_accepted_again():
    """A replica declared dead during a step sends hello at once; its engine is informed after the step."""
    stuck = StuckEngine()
    with cluster(1, engines=[stuck], timeout_s=1.0) as (one, _, client):
        future = client.submit([1], GREEDY)
        wait_for(stuck.has_unfinished)
        peer = next(iter(one.core._replicas))
        entered = one.core._num_entered
        one.core.unreachable(peer, "by a test")
        wait_for(lambda: one.core._num_entered == entered + 1)
        time.sleep(2.5)  # longer than the timeout: it sends heartbeats as its new incarnation and is answered
        assert one.core._num_entered == entered + 1
        stuck.wake.set()
        assert tokens_of(future.result(60)) == echo_tokens([1], 8)


def test_failing_engine_gives_its_requests_back():
    class Failing(EchoEngine):
        def step(self):
            raise RuntimeError("out of memory")

    with cluster(2, engines=[Failing(), EchoEngine()], policy="round_robin") as (_, replicas, client):
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)
        replicas[0].thread.join(60)
        assert str(replicas[0].failure) == "out of memory"


def test_request_that_outlives_too_many_replicas_is_given_up():
    class Failing(EchoEngine):
        def step(self):
            raise RuntimeError("this prompt kills")

    with cluster(3, engines=[Failing() for _ in range(3)], max_attempts=3) as (_, _, client):
        with pytest.raises(GenerationError, match=r"prompt 0 .*3 replicas were lost") as caught:
            client.generate([[1]], GREEDY)
        [output] = caught.value.outputs
        assert isinstance(output.error, protocol.ReplicaLost) and "3 replicas were lost" in str(output.error)
        assert output.outputs[0].finish_reason == "error"


# ---------------------------------------------------------------------- asyncio


def test_asyncio_client_generates_streams_aborts_and_controls():
    async def main(address):
        async with AsyncInferenceClient(address) as client:
            outputs = await client.generate(prompts(5), GREEDY)
            assert [tokens_of(output) for output in outputs] == [echo_tokens(prompt, 8) for prompt in prompts(5)]
            seen = [tokens_of(output) async for output in client.stream([1], GREEDY)]
            assert seen[-1] == echo_tokens([1], 8)
            with pytest.raises(InvalidPrompt):
                await client.generate(["text"], GREEDY)
            task = asyncio.ensure_future(client.generate([[1]], SamplingParams(max_tokens=4000, temperature=0.0)))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.pause()
            await client.unpause()
            return (await client.stats())["replicas"]

    engine = EchoEngine(step_s=0.001)
    with cluster(1, engines=[engine]) as (one, _, _):
        assert len(asyncio.run(main(one.address))) == 1
        wait_for(lambda: not engine.has_unfinished())


# ---------------------------------------------------------------------- authentication and limits

KEY = b"sixteen bytes or more"


@pytest.mark.security
def test_right_key_connects_and_wrong_or_missing_ones_are_refused():
    with cluster(1, key=KEY) as (one, _, client):
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)
        for key, message in ((b"another key, also long", "does not know this key"), (None, "asks for a key")):
            with InferenceClient(one.address, key=key) as other, pytest.raises(protocol.AccessRefused, match=message):
                other.generate([[1]], GREEDY)
            with replica(one.address, key=key, name="intruder") as intruder:
                intruder.thread.join(60)
                assert isinstance(intruder.failure, protocol.AccessRefused)
        assert [r["name"] for r in client.stats()["replicas"]] == ["r0"]


@pytest.mark.security
def test_who_knows_the_coordinators_public_key_alone_does_not_connect(monkeypatch):
    pair_of, foreign = access._curve_pair, zmq.curve_keypair()
    with cluster(1, key=KEY) as (one, _, client):
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)
        monkeypatch.setattr(access, "_curve_pair", lambda key, side: foreign if side == b"peer" else pair_of(key, side))
        with InferenceClient(one.address, key=KEY) as other, pytest.raises(protocol.AccessRefused):
            other.generate([[1]], GREEDY)


@pytest.mark.security
def test_client_with_a_key_sends_nothing_to_a_coordinator_that_does_not_know_it():
    with coordinator() as one, InferenceClient(one.address, key=KEY) as client:
        with pytest.raises(protocol.AccessRefused, match="does not know this key"):
            client.generate([[1]], GREEDY)
        assert one.core.counts.submitted == 0


def test_unreachable_coordinator_is_reported_in_time():
    began = time.monotonic()
    message = r"no coordinator answers at tcp://127\.0\.0\.1:9"
    with (
        InferenceClient("tcp://127.0.0.1:9", timeout_s=0.3) as client,
        pytest.raises(protocol.ConnectionLost, match=message),
    ):
        client.generate([[1]], GREEDY)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:5757", "tcp://127.0.0.1"])
def test_address_that_cannot_be_one_is_refused_with_an_example(address, capsys):
    for make in (Coordinator, InferenceClient):
        with pytest.raises(ConfigError, match=r"give one like tcp://127\.0\.0\.1:5757"):
            make(address)
    assert main(["replica", "no such model", "--coordinator", address]) == 2
    assert "give one like tcp://" in capsys.readouterr().err, "reported before a model is looked up"


def test_address_in_use_is_a_config_error():
    with coordinator(key=KEY) as one, pytest.raises(ConfigError, match="cannot listen at"):
        Coordinator(one.address, CoordinatorOptions(key=KEY))


class AskingPeer(RawPeer):
    def ask(self, *messages: bytes) -> protocol.Message:
        self.socket.send_multipart(protocol.frames_of(messages))
        return self.receive()

    def receive(self) -> protocol.Message:
        assert self.socket.poll(3000), "no answer"
        return protocol.decode(protocol.messages_of(self.socket.recv_multipart())[0])


def encoded(*items) -> bytes:
    return msgspec.msgpack.encode(list(items))


HELLO = encoded("hello", protocol.SCHEMA, "client", "raw", b"n")


def test_wrong_schema_is_refused_by_its_number_even_if_its_hello_has_another_shape():
    with coordinator() as one, AskingPeer(one.address) as peer:
        # clients of schema 5 send speculate=True with each request: an engine without drafts would refuse them all
        others = (protocol.SCHEMA + 1, "client", "x", b"n"), (99, {"new": True}), (5, "client", "x", b"n")
        for hello in (encoded("hello", *other) for other in others):
            answer = peer.ask(hello)
            assert answer.code == "schema" and f"coordinator schema {protocol.SCHEMA}" in answer.message
        assert isinstance(peer.ask(HELLO), protocol.Welcome)


@pytest.mark.security
@pytest.mark.parametrize(
    ("frame", "code", "message"),
    [
        (b"", "message", "0 bytes that are no message"),
        (b"\xc1" * 100, "message", "no message"),
        (b"\x91" * 50_000, "message", "no message"),
        (b"GET / HTTP/1.1\r\n\r\n", "message", "no message"),
        (encoded("teleport", 1), "message", f"type 'teleport' are unknown to schema {protocol.SCHEMA}"),
        (encoded("submit", "one"), "message", f"a submit message that schema {protocol.SCHEMA} does not allow"),
        (encoded("submit", 1, 7, None, "", {}, None, True), "message", "Expected `bytes | null`"),
        (encoded("beat", 0, [], 0, 0, 0.0), "role", "a Beat message is nothing a client sends"),
        (encoded("submit", 1, b"abc", None, "", {}, None, True), "output", "int32"),
        (encoded("submit", 1, b"abcd", None, "", {"n": 10**9}, None, True), "output", "n is 1000000000"),
        (encoded("control", 1, "__init__", {}, 1.0), "result", "unknown command '__init__'"),
        (encoded("submit", 1, b"\0" * (1 << 20), None, "", {}, None, True), "size", "the limit is 65,536"),
    ],
)
def test_malformed_messages_are_refused_and_other_clients_are_served(frame, code, message):
    with cluster(1, max_message=1 << 16) as (one, _, client), AskingPeer(one.address) as peer:
        assert isinstance(peer.ask(HELLO), protocol.Welcome)
        answer = peer.ask(frame)
        if code == "output":
            assert message in answer.refused.message
        elif code == "result":
            assert message in answer.answers["coordinator"].message
        else:
            assert (answer.code, message in answer.message) == (code, True), answer
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)


@pytest.mark.security
def test_frame_beyond_the_limit_ends_its_connection_alone():
    with cluster(1) as (one, _, client), AskingPeer(one.address) as peer:
        assert isinstance(peer.ask(HELLO), protocol.Welcome)
        peer.socket.send(bytes(2 * protocol.MAX_FRAME))  # libzmq itself closes the connection
        assert not peer.socket.poll(300)
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)


@pytest.mark.parametrize("size", [0, 1, protocol.MAX_FRAME - 1, protocol.MAX_FRAME, 3 * protocol.MAX_FRAME + 7])
def test_messages_of_any_size_come_out_of_their_frames(size):
    messages = [b"a", bytes(size), b"", b"b" * size]
    frames = protocol.frames_of(messages)
    assert protocol.messages_of(frames) == messages and max(map(len, frames)) <= protocol.MAX_FRAME


def test_message_beyond_the_limit_is_refused_where_it_is_sent():
    """Where it is received: a row of the malformed ones."""
    with cluster(1, max_message=1 << 16) as (_, _, client):
        with pytest.raises(protocol.MessageTooLarge, match=r"Submit of .* bytes, the limit is 65,536"):
            client.generate([list(range(20_000))], GREEDY)
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)


@pytest.mark.security
def test_unknown_connection_must_send_hello_and_random_bytes_never_end_the_coordinator():
    import random

    rng = random.Random(0)
    with cluster(1) as (one, _, client), AskingPeer(one.address) as peer:
        assert peer.ask(encoded("ping")).code == "hello"
        peer.ask(HELLO)
        for _ in range(300):
            frame = bytearray(rng.choice([HELLO, encoded("submit", 1, b"abcd", None, "", {"n": 1}, None, True)]))
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            peer.socket.send(bytes(frame[: rng.randrange(1, len(frame) + 1)]))
        assert tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)
