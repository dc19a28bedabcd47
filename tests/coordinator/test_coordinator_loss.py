"""A coordinator that dies or hangs: requests are handed in again, and no token is lost, doubled or changed."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time

import pytest
from coordinator_case import QUICK, replica, wait_for
from echo import EchoEngine, echo_tokens

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions


class Restarted:
    """A coordinator at one address that ends and begins again, as a killed process does: nothing of it is left."""

    def __init__(self, address, **options):
        self._address, self._options = address, CoordinatorOptions(**{**QUICK, **options})
        self.begin()

    def begin(self):
        self.one = Coordinator(self._address, self._options)
        self._thread = threading.Thread(target=self.one.run)
        self._thread.start()

    def end(self):
        self.one.stop()
        self._thread.join()
        self.one._outbox.clear()
        self.one.close()

    def restart(self):
        self.end()
        self.begin()


@contextlib.contextmanager
def case(*engines, reconnect_s=10.0, **options):
    """(restarted coordinator, client), and a replica for each engine."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mi-"))
        address = f"ipc://{folder}/c"
        restarted = Restarted(address, **options)
        stack.callback(lambda: restarted.end())
        for index, engine in enumerate(engines):
            stack.enter_context(replica(address, engine, name=f"r{index}"))
        client = stack.enter_context(InferenceClient(address, reconnect_s=reconnect_s))
        wait_for(lambda: len(client.stats()["replicas"]) == len(engines))
        yield restarted, client


def tokens_of(output, index=0):
    return output.outputs[index].token_ids


def seeds_of(coordinator):
    (client,) = coordinator.core._clients.values()
    return [request.seed for request in client.requests.values()]


@pytest.mark.long
def test_requests_of_every_kind_go_on_behind_their_tokens_when_the_coordinator_is_restarted():
    with case(EchoEngine(step_s=0.01), EchoEngine(step_s=0.01)) as (restarted, client):
        unseeded = client.stream([5, 5], SamplingParams(max_tokens=200))
        next(unseeded)  # its first output tells the client which seed the coordinator chose
        (seed,) = seeds_of(restarted.one)
        greedy = [client.submit([i, 7], SamplingParams(max_tokens=120, temperature=0.0)) for i in range(6)]
        seeded = [client.submit([i], SamplingParams(max_tokens=120, seed=i, n=2)) for i in range(3)]
        wait_for(lambda: restarted.one.core.counts.submitted == 10)
        for _ in range(3):
            time.sleep(0.3)
            restarted.restart()
        assert [tokens_of(one.result(60)) for one in greedy] == [echo_tokens([i, 7], 120) for i in range(6)]
        for i, one in enumerate(seeded):
            drawn = [tokens_of(one.result(60), index) for index in range(2)]
            assert drawn == [echo_tokens([i], 120, seed=i, index=index) for index in range(2)]
        *_, last = unseeded
        assert tokens_of(last) == echo_tokens([5, 5], 200, seed=seed)
        assert {one.result().outputs[0].finish_reason for one in greedy} == {"length"}
        for one in greedy:
            times, kinds = one.result().metrics, [event.kind for event in one.result().events]
            assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time < times.finished_time
            assert "HAND_IN_AGAIN" in kinds and kinds.count("ASSIGN") == 1
        restarted.one.core.check()


def test_stream_has_each_token_once_over_restarts():
    with case(EchoEngine(step_s=0.01)) as (restarted, client):
        seen, expected = [], echo_tokens([1, 2, 3], 150)
        for output in client.stream([1, 2, 3], SamplingParams(max_tokens=150, temperature=0.0)):
            assert expected[: len(tokens_of(output))] == tokens_of(output)
            seen.append(len(tokens_of(output)))
            if len(seen) in (20, 60):
                restarted.restart()
        assert seen == sorted(seen) and seen[-1] == 150


@pytest.mark.long
def test_coordinator_that_hangs_and_wakes_up_again_costs_no_token():
    with case(EchoEngine(step_s=0.01), timeout_s=0.4) as (restarted, client):
        future = client.submit([9], SamplingParams(max_tokens=200, temperature=0.0))
        wait_for(lambda: restarted.one.core.counts.submitted)
        time.sleep(0.2)
        awake = threading.Event()
        tick = restarted.one.core.tick

        def hang():
            awake.wait(10)
            restarted.one.core.tick = tick
            tick()

        restarted.one.core.tick = hang
        time.sleep(1.0)  # its clients and replicas have given it up
        awake.set()
        assert tokens_of(future.result(60)) == echo_tokens([9], 200)
        restarted.one.core.check()


def test_client_that_the_coordinator_gave_up_has_all_its_tokens():
    with case(EchoEngine(step_s=0.01)) as (restarted, client):
        futures = [client.submit([i], SamplingParams(max_tokens=100, temperature=0.0)) for i in range(3)]
        core = restarted.one.core
        for count in (3, 6):
            wait_for(lambda count=count: core.counts.submitted == count)
            time.sleep(0.2)
            core.unreachable(next(iter(core._clients)), "a test says so")
        assert [tokens_of(one.result(60)) for one in futures] == [echo_tokens([i], 100) for i in range(3)]
        core.check()


def test_coordinator_that_does_not_come_back_fails_its_requests_in_time():
    with case(EchoEngine(step_s=0.01), reconnect_s=0.3, timeout_s=1.0) as (restarted, client):
        future = client.submit([1], SamplingParams(max_tokens=4000, temperature=0.0))
        wait_for(lambda: restarted.one.core.counts.submitted)
        restarted.end()
        began = time.monotonic()
        with pytest.raises(protocol.ConnectionLost, match="was silent"):
            future.result(60)
        assert time.monotonic() - began < 5
        restarted.begin()
        wait_for(lambda: client.stats()["replicas"])
        output = client.generate([[3]], SamplingParams(max_tokens=8, temperature=0.0))[0]
        assert tokens_of(output) == echo_tokens([3], 8)


def test_abort_while_the_coordinator_is_away_ends_a_request_with_the_tokens_it_has():
    with case(EchoEngine(step_s=0.01)) as (restarted, client):
        params = SamplingParams(max_tokens=4000, temperature=0.0)
        futures = [client.submit([i], params) for i in range(2)]
        wait_for(lambda: restarted.one.core.counts.submitted == 2)
        time.sleep(0.6)
        restarted.end()
        client.abort(futures[0])
        restarted.begin()
        output = futures[0].result(60)
        count = len(tokens_of(output))
        assert output.outputs[0].finish_reason == "abort" and tokens_of(output) == echo_tokens([0], count)
        wait_for(lambda: restarted.one.core.counts.submitted == 1)
        client.abort(futures[1])
        assert futures[1].result(60).outputs[0].finish_reason == "abort"


def test_what_was_accepted_is_not_refused_by_a_full_queue_later():
    with case(EchoEngine(step_s=0.01, max_requests=2), max_queue=3) as (restarted, client):
        params = SamplingParams(max_tokens=30, temperature=0.0)
        futures = [client.submit([i], params) for i in range(6)]  # 3 at the replica, 3 wait
        wait_for(lambda: client.stats()["waiting"] == 3)
        restarted.restart()
        assert [tokens_of(future.result(60)) for future in futures] == [echo_tokens([i], 30) for i in range(6)]


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ([protocol.Kept(b"abc")], "no token ids"),
        ([protocol.Kept(b"abcd"), protocol.Kept(b"abcd")], "2 sequences so far"),
    ],
)
def test_output_so_far_that_does_not_fit_the_request_is_refused(kept, named):
    with case(EchoEngine()) as (restarted, _):
        (state,) = restarted.one.core._clients.values()
        sent = []
        dispatch = restarted.one.core.dispatch
        dispatch._send = lambda peer, message: sent.append(message)
        dispatch.submit(state, protocol.Submit(1, b"abcd", None, "", {"n": 1}, None, True, kept=kept))
        assert named in sent[0].refused.message


def is_known(client: InferenceClient) -> bool:
    """Whether the coordinator of now has welcomed the client."""
    try:
        client.stats()
    except protocol.ConnectionLost:
        return False
    return True


def test_restarted_coordinator_is_told_by_its_replicas_of_the_pause_and_of_the_version_that_was_set():
    with case(EchoEngine()) as (restarted, client):
        client.set_weight_version(5)
        client.pause()
        restarted.restart()
        wait_for(lambda: len(restarted.one.core.stats()["replicas"]) == 1 and is_known(client))
        with replica(restarted.one.address, name="late"):
            wait_for(lambda: [one["state"] for one in client.stats()["replicas"]] == ["paused"] * 2)
            client.unpause()
            futures = [client.submit([number], SamplingParams(max_tokens=4, temperature=0.0)) for number in range(6)]
            assert [tokens_of(future.result(10)) for future in futures] == [echo_tokens([n], 4) for n in range(6)]
            sent = {one["name"]: one["stats"]["figures"]["output_tokens"] for one in client.stats()["replicas"]}
            assert sent["late"] == 0, "a replica with old weights has served"
            client.set_weight_version(6)
            restarted.restart()  # the pause has ended, and the new one is not told of it
            wait_for(lambda: [one["state"] for one in restarted.one.core.stats()["replicas"]] == ["running"] * 2)
