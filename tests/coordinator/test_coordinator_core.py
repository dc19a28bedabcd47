"""CoordinatorCore under random events, without sockets: no request is lost, no token is sent twice."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import tracemalloc
from collections import deque

import pytest
from echo import echo_tokens

from megatron_infer.config.coordinator_options import CoordinatorOptions, ReplicaRole
from megatron_infer.coordinator import broadcast, core, protocol
from megatron_infer.coordinator.core import CoordinatorCore
from megatron_infer.coordinator.peers import PendingRequest
from megatron_infer.coordinator.router import MAX_LOOKED_AT
from megatron_infer.errors import ConfigError
from megatron_infer.outputs.schema import Piece, bytes_to_ids, ids_to_bytes
from megatron_infer.scheduler.context.block_digest import DIGEST_SIZE, root_of

ROOT = root_of(model="m")


class World:
    """A CoordinatorCore, scripted peers, and a clock that tests advance."""

    def __init__(self, **options) -> None:
        self.now = 0.0
        self.sent: deque[tuple[bytes, protocol.Message]] = deque()
        settings = {"policy": "longest_prefix", "timeout_s": 2.0, "max_attempts": 1000} | options
        self.options = CoordinatorOptions(**settings)
        self.begin()
        self.inboxes: dict[bytes, list[protocol.Message]] = {}

    def begin(self):
        """A coordinator that knows nothing of one before."""
        self.core = CoordinatorCore(self.options, self.send, clock=lambda: self.now)

    def send(self, peer, message):
        self.inboxes.setdefault(peer, []).append(message)

    def take(self, peer):
        return self.inboxes.pop(peer, [])

    def client(self, peer=b"client", *, name="c"):
        self.core.enter(peer, "client", name, os.urandom(8))
        return peer

    def replica(
        self, peer, *, name="", capacity=2, version=0, state="running", adapters=None, role="", num_blocks=None, **more
    ):
        incarnation = self.core.enter(peer, "replica", name or peer.decode(), os.urandom(8))
        if role:
            more["role"] = ReplicaRole(role)
        now = protocol.EngineNow(root=ROOT, weight_version=version, state=state, adapters=adapters or {})
        sizes = {"block_size": 4, "capacity": capacity, "model": "m", "policy": "longest_prefix", "alpha": 0.5}
        if num_blocks is not None:
            sizes["limits"] = {"max_sequence_length": 1000, "vocab_size": 1000, "num_blocks": num_blocks}
        self.core.receive(peer, protocol.Register(incarnation, protocol.EngineInfo(now=now, **sizes), **more))
        return incarnation

    def submit(self, number, *, count=8, client=b"client", caller="", call="", kept=None, **more):
        prompt = ids_to_bytes([number, number % 5, 7])
        params = {"max_tokens": count, "temperature": 0.0, **more}
        self.core.receive(client, protocol.Submit(number, prompt, None, "", params, None, True, caller, call, kept))

    def served(self, peer, incarnation):
        """The numbers of all requests in the order in which the replica gets them, each ended at once."""
        order = []
        while runs := self.runs(peer):
            for run in runs:
                order.append(bytes_to_ids(run.prompt)[0])
                self.core.check()
                self.core.receive(peer, protocol.Output(run.number, incarnation, [], True))
        return order

    def beat(self, peer, incarnation, *, root=ROOT, version=0, foreign=0, **now):
        now = protocol.EngineNow(root=root, weight_version=version, **now)
        self.core.receive(peer, protocol.Beat(incarnation, now, 1, foreign, 0.0))

    def commands(self, peer):
        return [message for message in self.take(peer) if isinstance(message, protocol.Command)]

    def commanded(self, peer):
        return [message.command for message in self.commands(peer)]

    def runs(self, peer):
        return [message for message in self.take(peer) if isinstance(message, protocol.Run)]

    def pass_time(self, seconds, *, beats=()):
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            for peer, incarnation in beats:
                self.beat(peer, incarnation)
            self.core.tick()


class Worker:
    """A replica that samples a few tokens of its requests at every `work`."""

    def __init__(self, world, peer) -> None:
        self.world, self.peer = world, peer
        self.incarnation = world.replica(peer, capacity=3, num_blocks=50)
        self.runs: dict[int, list] = {}

    def read(self):
        for message in self.world.take(self.peer):
            if isinstance(message, protocol.Run):
                drawn = bytes_to_ids(message.kept[0].tokens) if message.kept else []
                self.runs[message.number] = [message, drawn]
            elif isinstance(message, protocol.Cancel) and message.number in self.runs:
                run, drawn = self.runs.pop(message.number)
                if not message.silent:
                    self.send(run, drawn, [], "abort")
            elif isinstance(message, protocol.HandOut) and self.runs.pop(message.number, None):
                self.tell(protocol.HandedOut(message.number, self.incarnation))

    def work(self, rng):
        self.read()
        if self.runs and rng.random() < 0.3:
            self.tell(protocol.EvictsNext(rng.sample(list(self.runs), min(2, len(self.runs))), self.incarnation))
        for number, (run, drawn) in list(self.runs.items()):
            if rng.random() < 0.5:
                continue
            count, prompt = run.params["max_tokens"], bytes_to_ids(run.prompt)
            new = echo_tokens(prompt, count)[len(drawn) : len(drawn) + rng.randrange(1, 4)]
            ended = len(drawn) + len(new) == count
            self.send(run, drawn, new, "length" if ended else None)
            drawn += new
            if ended:
                del self.runs[number]

    def send(self, run, drawn, new, reason):
        piece = Piece(0, len(drawn), ids_to_bytes(new), "", reason)
        self.tell(protocol.Output(run.number, self.incarnation, [piece], reason is not None))

    def tell(self, message):
        if self.world.core.knows(self.peer):
            self.world.core.receive(self.peer, message)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_with_its_tokens_whatever_happens_to_replicas_and_coordinators(seed):
    rng, world = random.Random(seed), World(max_queue=1000)
    client, workers, names = world.client(), [], iter(range(10**6))
    gone: list[Worker] = []
    aborted, answers, expected, ended = set(), {}, {}, {}
    for step in range(400):
        event = rng.random()
        if step < 300 and event < 0.35:
            number, count = len(expected) + 1, rng.randrange(1, 12)
            expected[number] = echo_tokens([number, number % 5, 7], count)
            world.submit(number, count=count)
        elif event < 0.40 and len(workers) < 4:
            workers.append(Worker(world, f"w{next(names)}".encode()))
        elif event < 0.44 and workers:
            worker = workers.pop(rng.randrange(len(workers)))
            world.core.unreachable(worker.peer)
            gone.append(worker)
        elif event < 0.46 and workers:
            worker = rng.choice(workers)
            world.core.receive(worker.peer, protocol.Goodbye(draining=True))
        elif event < 0.50 and expected:
            number = rng.choice(sorted(expected))
            world.core.receive(client, protocol.Abort(number))
            aborted.add(number)
        elif event < 0.55 and gone:
            gone[-1].work(rng)  # late messages of a removed replica
        elif event < 0.58:
            if event < 0.565:  # the coordinator dies; else it has given the client up
                world.begin()
                world.inboxes.clear()
                workers = [Worker(world, worker.peer) for worker in workers]
            hand_in_again(world, expected, aborted, answers, ended)
        elif workers:
            rng.choice(workers).work(rng)
        collect(world.take(client), answers, ended)
        world.core.check()
    for peer in (b"last-1", b"last-2"):
        workers.append(Worker(world, peer))
    for _ in range(600):
        for worker in workers:
            worker.work(rng)
        collect(world.take(client), answers, ended)
    world.core.check()
    assert ended.keys() == expected.keys()
    for number, tokens in expected.items():
        if number in aborted:
            assert tokens[: len(answers[number])] == answers[number]
        else:
            assert answers[number] == tokens, f"request {number}"
    assert world.core.stats()["waiting"] == 0


def test_what_has_ended_is_freed_without_a_collection():
    """The coordinator's process does without full collections, which stop it for long."""
    world = World(max_queue=1000)
    world.client()
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 40):
            world.submit(number, count=4)
        workers = [Worker(world, f"w{index}".encode()) for index in range(3)]
        for number in range(1, 10):
            world.core.receive(b"client", protocol.Abort(number))
        rng = random.Random(0)
        for worker in workers * 40:
            worker.work(rng)
        world.core.unreachable(b"w0")
        for worker in workers[1:] * 400:
            worker.work(rng)
        assert world.core.counts.finished > 20 and not world.core.stats()["waiting"]
        live = [one for one in gc.get_objects() if isinstance(one, PendingRequest)]
        assert not live
    finally:
        gc.enable()


def hand_in_again(world, expected, aborted, answers, ended):
    """What a client does that was lost: news on the way to it is dropped, and what it has continues."""
    world.take(b"client")
    world.client()
    for number, tokens in expected.items():
        have = answers.setdefault(number, [])
        if number in ended:
            continue
        if number in aborted:
            ended[number] = None
            continue
        kept = [protocol.Kept(ids_to_bytes(have))] if have else []
        world.submit(number, count=len(tokens), kept=kept)


def collect(messages, answers, ended):
    for message in messages:
        if not isinstance(message, protocol.Output):
            continue
        assert message.number not in ended, f"request {message.number} has news after its end"
        for piece in message.pieces:
            have = answers.setdefault(message.number, [])
            assert piece.offset == len(have), f"request {message.number}: token {piece.offset} after {len(have)}"
            have += bytes_to_ids(piece.tokens)
        answers.setdefault(message.number, [])
        if message.finished:
            ended[message.number] = message


def test_silent_replica_is_lost_at_the_timeout_and_not_before():
    world = World()
    client, one, two = world.client(), world.replica(b"one"), world.replica(b"two")
    world.submit(1)
    world.submit(2)
    owner = {message.number: peer for peer in (b"one", b"two") for message in world.take(peer)}
    assert len(owner) == 2
    beats = [(b"two", two)]
    world.core.receive(client, protocol.Ping())
    world.pass_time(2.0, beats=beats)
    assert world.core.knows(b"one")
    world.core.receive(client, protocol.Ping())
    world.pass_time(0.5, beats=beats)
    assert not world.core.knows(b"one") and world.core.knows(b"two")
    assert world.runs(b"two")
    assert one < two


def test_coordinator_that_was_stopped_itself_removes_no_peer():
    world = World()
    world.client()
    incarnation = world.replica(b"one")
    world.pass_time(1.0, beats=[(b"one", incarnation)])
    world.now += 60.0  # stopped and continued
    world.core.tick()
    assert world.core.knows(b"one") and world.core.knows(b"client")


def test_silent_client_keeps_its_requests_for_long_and_then_they_are_cancelled():
    world = World(client_timeout_s=30.0)
    world.client()
    incarnation = world.replica(b"one")
    world.submit(1)
    world.pass_time(29.0, beats=[(b"one", incarnation)])  # over ten times a replica's timeout
    run = world.runs(b"one")[0]
    piece = Piece(0, 0, ids_to_bytes([1, 2]), "")
    world.take(b"client")
    world.core.receive(b"one", protocol.Output(run.number, incarnation, [piece], False))
    assert [m.pieces for m in world.take(b"client")] == [[piece]], "what it reads when it is back"
    world.pass_time(2.0, beats=[(b"one", incarnation)])
    assert not world.core.knows(b"client")
    assert [m.silent for m in world.take(b"one") if isinstance(m, protocol.Cancel)] == [True]
    world.core.check()


def test_tokens_out_of_order_remove_the_replica_and_keep_the_stream():
    world = World()
    client = world.client()
    incarnation = world.replica(b"one")
    world.submit(1)
    run = world.runs(b"one")[0]
    good = Piece(0, 0, ids_to_bytes([1, 2]), "")
    world.core.receive(b"one", protocol.Output(run.number, incarnation, [good], False))
    gap = Piece(0, 3, ids_to_bytes([4]), "")
    world.core.receive(b"one", protocol.Output(run.number, incarnation, [gap], False))
    assert not world.core.knows(b"one")
    assert [m.pieces for m in world.take(client)] == [[good]]
    world.replica(b"two")
    moved = world.runs(b"two")[0]
    assert bytes_to_ids(moved.kept[0].tokens) == [1, 2]
    world.core.check()


def test_output_of_a_cancelled_request_reaches_no_other():
    world = World()
    client, other = world.client(), world.client(b"other")
    incarnation = world.replica(b"one")
    world.submit(1)
    world.submit(2, client=other)
    first, second = world.runs(b"one")
    world.core.unreachable(client)
    piece = Piece(0, 0, ids_to_bytes([5]), "")
    world.core.receive(b"one", protocol.Output(first.number, incarnation, [piece], False))
    assert world.take(other) == [] and world.core.counts.fenced == 1 and world.core.knows(b"one")
    world.core.receive(b"one", protocol.Output(second.number, incarnation, [piece], False))
    assert [m.pieces for m in world.take(other)] == [[piece]]
    world.core.check()


def test_message_of_an_earlier_incarnation_is_dropped():
    world = World()
    client = world.client()
    old = world.replica(b"one")
    world.submit(1)
    run = world.runs(b"one")[0]
    new = world.replica(b"one")  # it registered again on the same connection
    assert new > old
    piece = Piece(0, 0, ids_to_bytes([1]), "", "length")
    world.core.receive(b"one", protocol.Output(run.number, old, [piece], True))
    assert world.take(client) == [] and world.core.counts.fenced == 1
    again = world.runs(b"one")[0]
    assert again.number != run.number
    world.core.check()


def test_replica_with_old_weights_gets_no_request_until_it_has_the_new_ones():
    world = World()
    client = world.client()
    one, two = world.replica(b"one"), world.replica(b"two")
    world.core.receive(client, protocol.Control(5, "set_weight_version", {"version": 3}, 1.0))
    command = world.commands(b"one")[0]
    world.beat(b"one", one, version=3)
    world.core.receive(b"one", protocol.Done(command.number, one, protocol.Answer(ok=True)))
    assert not any(isinstance(m, protocol.ControlResult) for m in world.take(client))
    for _ in range(6):
        world.now += 0.25
        world.beat(b"one", one, version=3)
        world.beat(b"two", two)
        world.core.tick()
    result = next(m for m in world.take(client) if isinstance(m, protocol.ControlResult))
    assert {name: answer.ok for name, answer in result.answers.items()} == {"one": True, "two": False}
    world.take(b"two")
    for number in range(1, 4):
        world.submit(number)
    assert not world.runs(b"two")
    world.beat(b"two", two, version=3)
    for number in range(4, 8):
        world.submit(number)
    assert world.runs(b"two")


def test_control_without_replicas_answers_at_once_and_holds_for_those_that_join():
    world = World()
    client = world.client()
    world.core.receive(client, protocol.Control(1, "pause", {"mode": "keep"}, 1.0))
    assert world.take(client) == [protocol.ControlResult(1, {})]
    world.replica(b"one")
    assert world.commanded(b"one") == ["pause"]


def test_replica_that_was_away_at_the_end_of_a_pause_is_told_of_it_and_one_of_an_earlier_coordinator_is_not():
    world = World()
    client = world.client()
    world.replica(b"old", state="paused", in_force={"pause": {"mode": "keep"}, "shut_down": {}})
    world.core.receive(client, protocol.Control(1, "profile", {"steps": 1}, 0.0))
    world.core.tick()
    world.take(b"old")
    world.replica(b"new")
    world.replica(b"late", state="paused", in_force={"pause": {"mode": "keep"}})
    assert world.commanded(b"new") == ["pause"] and not world.commands(b"late") and not world.commands(b"old")
    for peer in (b"old", b"new", b"late"):
        world.core.unreachable(peer, "gone")
    world.core.receive(client, protocol.Control(2, "unpause", {}, 1.0))
    world.replica(b"late", state="paused", in_force={"pause": {"mode": "keep"}})
    world.replica(b"another")
    assert world.commanded(b"late") == ["unpause"] and world.commanded(b"another") == []


@pytest.mark.parametrize(("command", "ok"), [("pause", True), ("pause", False), ("unpause", True)])
def test_replica_that_joins_while_a_command_runs_gets_it_when_it_is_in_force(command, ok):
    world = World()
    client = world.client()
    if command == "unpause":
        world.core.receive(client, protocol.Control(1, "pause", {"mode": "keep"}, 1.0))
    incarnation = world.replica(b"one")
    world.take(b"one")
    world.core.receive(client, protocol.Control(2, command, {}, 1.0))
    (sent,) = world.commands(b"one")
    world.replica(b"late")
    world.replica(b"gone")
    assert world.commanded(b"late") == (["pause"] if command == "unpause" else [])
    world.core.unreachable(b"gone", "gone")
    world.take(b"gone")
    world.core.receive(b"one", protocol.Done(sent.number, incarnation, protocol.Answer(ok=ok)))
    assert world.commanded(b"late") == ([command] if ok else []) and not world.commanded(b"gone")


def test_replica_that_joins_while_an_adapter_is_loaded_takes_part_in_its_undo():
    world = World()
    client = world.client()
    incarnations, number = {b"one": world.replica(b"one")}, 0

    def commands(peer):
        told = world.commands(peer)
        return [(m.command, m.args.get("name"), m.args.get("change")) for m in told], told[-1:]

    def broadcast(command, joins=None, **args):
        nonlocal number
        number += 1
        world.core.receive(client, protocol.Control(number, command, args, 1.0))
        _, (sent,) = commands(b"one")
        done = [(peer, protocol.Done(sent.number, one, protocol.Answer(ok=True))) for peer, one in incarnations.items()]
        if joins is not None:
            incarnations[joins] = world.replica(joins)
        for peer, message in done:
            world.core.receive(peer, message)

    broadcast("load_adapter", name="old", path="x", change="a")
    broadcast("unload_adapter", name="old", change="b")
    broadcast("load_adapter", name="new", path="y", change="c", joins=b"two")
    assert commands(b"two")[0] == [("load_adapter", "new", "c")], "under the change that the others know"
    broadcast("undo_adapter", name="new", change="c", joins=b"three")
    assert commands(b"two")[0] == [("undo_adapter", "new", "c")]
    assert commands(b"three")[0] == [("load_adapter", "new", "c"), ("undo_adapter", "new", "c")]


def test_requests_wait_by_priority_and_then_by_arrival():
    world = World()
    client = world.client()
    for number, priority in ((1, 0), (2, 5), (3, 0), (4, -1)):
        world.submit(number, priority=priority)
    world.submit(5, priority="soon")
    (refused,) = world.take(client)
    assert refused.refused.kind == "RequestError" and "priority" in refused.refused.message
    worker = Worker(world, b"one")  # takes four: as many as its rows and one more
    for number, priority in ((6, 5), (7, 0), (8, -1)):
        world.submit(number, priority=priority)

    def sent():
        return [bytes_to_ids(run.prompt)[0] for run in world.take(b"one") if isinstance(run, protocol.Run)]

    assert sent() == [4, 1, 3, 2]
    for run_number in range(1, 4):
        world.core.receive(b"one", protocol.Output(run_number, worker.incarnation, [], True))
    assert sent() == [8, 7, 6]


def test_callers_take_turns_and_a_callers_calls_do_within_a_priority():
    world = World()
    world.client()
    world.client(b"other", name="d")
    for number in range(100, 120):
        world.submit(number, caller="a", call="batch")
    for number in (1, 2):
        world.submit(number, caller="a", call="single")
    for number in (11, 12, 13):
        world.submit(number, caller="b", call=f"{number}")
    world.submit(21, client=b"other", caller="a", call="batch")  # the callers of another name are others
    world.submit(31, caller="c", priority=1)
    world.submit(41, caller="a", call="late", priority=-1)
    order = world.served(b"one", world.replica(b"one"))
    assert order == [41, 100, 11, 21, 1, 12, 101, 13, 2, *range(102, 120), 31]
    world.core.check()


def test_a_caller_is_one_in_all_clients_of_a_name_and_who_names_none_is_its_client():
    world = World(max_queue=16)
    clients = [world.client(peer) for peer in (b"http0", b"http1")]
    for number in range(100, 120):
        world.submit(number, client=clients[number % 2], caller="a")
    refused = [m for peer in clients for m in world.take(peer)]
    assert len(refused) == 6 and all("14 requests of this caller" in m.refused.message for m in refused)
    for number in (1, 2):
        world.submit(number, client=clients[number - 1])
    order = world.served(b"one", world.replica(b"one"))
    assert order[:4] == [100, 1, 2, 101] and len(order) == 16
    world.core.check()


@pytest.mark.security
@pytest.mark.parametrize("role", ["prefill_and_decode", "decode_only"])
def test_a_late_caller_has_its_share_of_a_full_replica_at_once(role):
    """A request that is at a prefill engine takes its caller's share of the decode engine that keeps its place."""
    world, peer = World(role_min_prompt_tokens=3), b"one" if role == "prefill_and_decode" else b"prefill"
    world.client()
    incarnations = {b"one": world.replica(b"one", capacity=2, role=role)}  # holds three
    if peer not in incarnations:
        incarnations[peer] = world.replica(peer, capacity=50, role="prefill_only")
    for number in range(100, 200):
        world.submit(number, caller="a", call="batch")
    world.submit(1, caller="b")
    world.submit(2, caller="b")
    for number in range(3, 20):
        world.submit(number, caller="c")
    sent = world.runs(peer)
    assert [bytes_to_ids(run.prompt)[0] for run in sent] == [100, 101, 102, 1, 3]
    assert len({run.caller for run in sent}) == 3 and sent[0].caller == sent[2].caller
    for run in sent[:3]:  # two callers are below a third of three
        world.core.receive(peer, protocol.Output(run.number, incarnations[peer], [], True))
    world.core.check()
    sent = world.runs(peer)
    assert [bytes_to_ids(run.prompt)[0] for run in sent] == [103]


@pytest.mark.security
def test_one_caller_cannot_fill_the_queue():
    world = World(max_queue=16)
    client = world.client()
    for number in range(100, 120):
        world.submit(number, caller="a")
    refused = [m.refused for m in world.take(client)]
    assert len(refused) == 6 and {one.kind for one in refused} == {"Overloaded"}
    assert "14 requests of this caller wait here, the limit is 14 of max_queue, 16" in refused[0].message
    world.submit(1, caller="b")
    world.submit(2, caller="c")
    assert not world.take(client)
    world.submit(3, caller="d")
    assert "16 requests wait here, the limit is 16 (max_queue)" in world.take(client)[0].refused.message
    order = world.served(b"one", world.replica(b"one"))
    assert order[:4] == [100, 1, 2, 101] and len(order) == 16
    world.take(client)
    world.submit(200, caller="a")
    assert not world.take(client)


@pytest.mark.security
def test_requests_that_claim_to_be_handed_in_again_are_bounded_too():
    world = World(max_queue=4)
    client = world.client()
    for number in range(40):
        world.submit(number, caller="a", kept=[])
    refused = [m.refused for m in world.take(client)]
    assert len(refused) == 8 and "limit is 4 (max_queue), 8 times that for requests handed in again" in str(refused[0])


def drained(world, name, **more):
    """A client's drain -> the answer by the name that it is of."""
    world.take(b"client")
    world.core.receive(b"client", protocol.Drain(1, name, **more))
    (result,) = (one for one in world.take(b"client") if isinstance(one, protocol.ControlResult))
    ((of, answer),) = result.answers.items()
    return of, answer


def states(world):
    return {replica["incarnation"]: replica["state"] for replica in world.core.stats()["replicas"]}


@pytest.mark.security
def test_a_drain_is_a_command_that_holds_for_all_of_a_name_until_its_end():
    """Also for a replica that says hello again; not for one without control, nor after a replica's goodbye."""
    world = World()
    world.client()
    world.replica(b"free")
    of, answer = drained(world, "free")
    assert (of, answer.kind) == ("free", "AccessRefused") and "--control" in answer.message
    assert set(states(world).values()) == {"running"}
    for peer in (b"1", b"2"):
        world.replica(peer, name="twin", takes_commands=True)
    for number in range(1, 4):
        world.submit(number)
    running = sum(len(one.running) for one in world.core._replicas.values() if one.name == "twin")
    of, answer = drained(world, "twin", move=True)
    assert of == "twin" and answer.value == {"running": running} and running
    assert sorted(states(world).values()) == ["draining", "draining", "running"]
    again = world.replica(b"1", name="twin", takes_commands=True)
    assert states(world)[again] == "draining"
    world.core.receive(b"2", protocol.Goodbye())
    world.core.receive(b"1", protocol.Goodbye())
    again = world.replica(b"1", name="twin", takes_commands=True)
    assert states(world)[again] == "running"
    drained(world, "twin")
    assert drained(world, "twin", end=True)[1].ok and set(states(world).values()) == {"running"}
    drained(world, "twin")
    world.core.unreachable(b"1")
    assert drained(world, "twin", end=True)[1].ok, "it is lost for now"
    again = world.replica(b"1", name="twin", takes_commands=True)
    assert states(world)[again] == "running"
    world.core.check()


@pytest.mark.security
@pytest.mark.parametrize("command", ["load_adapter", "unload_adapter", "undo_adapter", "settle_adapter"])
def test_a_command_for_an_adapter_without_a_name_is_refused_and_later_replicas_join(command):
    world = World()
    client = world.client()
    for args in ({}, {"name": 5}, {"path": "p", "name": None}):
        world.core.receive(client, protocol.Control(1, command, args, 1.0))
        (result,) = world.take(client)
        assert "name of an adapter is missing" in result.answers["coordinator"].message
    incarnation = world.replica(b"one")
    assert states(world) == {incarnation: "running"} and not world.commands(b"one")


@pytest.mark.security
def test_a_drain_of_an_unknown_name_is_answered_briefly_however_many_replicas_there_are():
    world = World()
    world.client()
    for index in range(1000):
        world.replica(f"{'x' * 190}-{index}".encode())
    _, answer = drained(world, "y" * 100_000, move=True)
    assert answer.kind == "ConfigError" and "and 980 more" in answer.message and len(answer.message) < 5000


@pytest.mark.security
def test_a_replica_that_moves_all_it_has_and_is_the_only_one_keeps_its_requests():
    world = World()
    world.client()
    incarnation = world.replica(b"only", takes_commands=True)
    world.submit(1)
    (run,) = world.runs(b"only")
    _, answer = drained(world, "only", move=True)
    assert answer.value == {"running": 1} and not world.take(b"only"), "there is no other one"
    world.core.receive(b"only", protocol.HandedOut(run.number, incarnation, "x"))
    assert world.core.stats()["waiting"] == 1 and not world.runs(b"only")
    assert drained(world, "only", end=True)[1].ok
    assert world.served(b"only", incarnation) == [1]
    world.core.check()


@pytest.mark.long
@pytest.mark.security
def test_a_day_of_replicas_that_come_and_go_leaves_nothing(monkeypatch, caplog):
    """Each under a name that nobody uses again: with requests and prefixes, drained, and mostly killed."""
    caplog.set_level(logging.CRITICAL, logger="megatron_infer.coordinator")
    monkeypatch.setattr(core, "MAX_LOST_DRAINED", 8)
    monkeypatch.setattr(broadcast, "MAX_UNLOADED", 8)
    world = World()
    world.client()
    sizes, numbers = [], itertools.count(1)
    tracemalloc.start()
    try:
        for index in range(601):
            peer = f"pod-{index}-{'x' * 100}".encode()
            changes = {f"adapter-{index}": (float(index), None)}
            of = world.replica(peer, capacity=1, num_blocks=50, takes_commands=True, adapter_changes=changes)
            world.core.receive(peer, protocol.PrefixNews(of, ROOT, True, b"", os.urandom(DIGEST_SIZE * 20)))
            given = [next(numbers) for _ in range(4)]
            for number in given:
                world.submit(number)
            assert states(world) == {of: "running"}
            drained(world, peer.decode(), move=index % 2 == 0)
            assert states(world) == {of: "draining"}
            if index % 10 == 9:
                world.core.receive(peer, protocol.Goodbye())
            world.core.unreachable(peer)
            for number in given:
                world.core.receive(b"client", protocol.Abort(number))
            world.pass_time(0.5)
            world.core.receive(b"client", protocol.Ping())
            world.inboxes.clear()
            world.core.check()
            if index in (100, 600):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        assert sizes[1] - sizes[0] < 20_000, sizes
        assert drained(world, peer.decode(), end=True)[1].ok
        of, answer = drained(world, peer.decode().replace("600", "1"), end=True)
        assert (of, answer.ok) == ("coordinator", False) and "there are: none" in answer.message
    finally:
        tracemalloc.stop()


def test_a_place_that_a_lost_prefill_engine_had_at_another_one_is_filled():
    world = World(role_min_prompt_tokens=3)
    world.client()
    world.replica(b"prefill", capacity=8, role="prefill_only")
    decode = world.replica(b"decode", capacity=1, role="decode_only")
    for number in range(1, 4):
        world.submit(number)
    assert len(world.runs(b"prefill")) == 2 and not world.runs(b"decode"), "the third waits for a place"
    for number in range(1, 3):
        world.core.receive(b"client", protocol.Abort(number))
    world.core.unreachable(b"prefill")
    assert world.served(b"decode", decode) == [3]
    world.core.check()


@pytest.mark.security
def test_parcels_are_at_the_address_that_their_replica_has_registered():
    world = World(role_min_prompt_tokens=3)
    world.client()
    world.replica(b"wrong", parcels="inproc://zeromq.zap.01")
    assert "neither tcp:// nor ipc://" in world.take(b"wrong")[-1].message and not states(world)
    prefill = world.replica(b"prefill", role="prefill_only", parcels="tcp://10.0.0.1:7")
    world.replica(b"decode", role="decode_only")
    world.submit(1)
    (run,) = world.runs(b"prefill")
    world.core.receive(b"prefill", protocol.HandedOut(run.number, prefill, "x"))
    (run,) = world.runs(b"decode")
    assert run.parcel == protocol.ParcelPlace("tcp://10.0.0.1:7", "x")
    world.core.check()


def short_of_blocks(*, policy="longest_prefix", **more):
    """A world in which replica "a" runs a request and lacks blocks -> (world, its incarnation, its run)."""
    world = World(policy=policy)
    world.client()
    incarnation = world.replica(b"a", capacity=8, num_blocks=4, **more)
    world.submit(1)
    (run,) = world.runs(b"a")
    return world, incarnation, run


def ask_for_room(world, peer, incarnation, *runs):
    """-> the number of the request that the replica is to hand out, if it is to."""
    world.take(peer)
    world.core.receive(peer, protocol.EvictsNext([run.number for run in runs], incarnation))
    world.core.check()
    numbers = [message.number for message in world.take(peer) if isinstance(message, protocol.HandOut)]
    assert len(numbers) <= 1
    return next(iter(numbers), None)


def test_a_request_that_would_be_evicted_goes_once_to_a_replica_that_is_half_empty():
    world, one, run = short_of_blocks()
    other = world.replica(b"b", capacity=8, num_blocks=4)
    assert ask_for_room(world, b"a", one, run)
    assert not ask_for_room(world, b"a", one, run), "it is on its way"
    world.core.receive(b"a", protocol.HandedOut(run.number, one, "x"))
    (again,) = world.runs(b"b")
    assert bytes_to_ids(again.prompt) == bytes_to_ids(run.prompt)
    counts = world.core.counts
    assert (counts.moved, counts.relieved, counts.resent) == (1, 1, 0)
    assert not ask_for_room(world, b"b", other, again), "the first one is empty now, and the request has moved"
    world.submit(2)
    world.submit(3)
    (third,) = world.runs(b"b")
    assert ask_for_room(world, b"b", other, again, third) == third.number, "of two the one that has not moved"
    assert not ask_for_room(world, b"b", other, again, third), "both are on their way or have moved"
    world.core.receive(b"b", protocol.Output(again.number, other, [Piece(0, 0, b"", "", "length")], True))
    world.core.check()


def test_where_no_other_has_the_adapter_of_the_first_request_the_next_one_moves():
    world, one, run = short_of_blocks(adapters={"x": "1"})
    world.submit(2, adapter="x")
    (of_adapter,) = world.runs(b"a")
    world.replica(b"b", capacity=8, num_blocks=4)
    assert not ask_for_room(world, b"a", one, of_adapter)
    assert ask_for_room(world, b"a", one, of_adapter, run) == run.number


@pytest.mark.parametrize("policy", ["longest_prefix", "round_robin"])
@pytest.mark.parametrize("least", ["adapter", "rows"])
def test_a_place_is_found_after_any_number_of_replicas_that_cannot_have_the_request(policy, least):
    world, one, _ = short_of_blocks(adapters={"x": "1"}, policy=policy)
    world.submit(2, adapter="x")
    (run,) = world.runs(b"a")
    for index in range(MAX_LOOKED_AT + 8):
        peer = f"n{index}".encode()
        if least == "adapter":
            world.replica(peer, capacity=8, num_blocks=4)
            continue
        incarnation = world.replica(peer, capacity=8, num_blocks=4, adapters={"x": "1"})
        world.beat(peer, incarnation, foreign=5, adapters={"x": "1"})
    world.replica(b"last", capacity=8, num_blocks=4, adapters={"x": "1"})
    assert ask_for_room(world, b"a", one, run)
    world.core.receive(b"a", protocol.HandedOut(run.number, one, "x"))
    assert world.runs(b"last")


@pytest.mark.parametrize(
    "other",
    [
        {"num_blocks": 1},
        {"num_blocks": None},
        {"version": 1},
        {"role": "prefill_only"},
        {"state": "paused"},
        {"capacity": 1},
        {"capacity": 3},
    ],
    ids=str,
)
def test_a_request_that_would_be_evicted_stays_where_no_other_has_room_or_can_use_its_memory(other):
    world, one, run = short_of_blocks()
    world.submit(2)
    world.replica(b"b", **{"capacity": 8, "num_blocks": 4} | {k: v for k, v in other.items() if k != "version"})
    if "version" in other:
        world.beat(b"b", world.core._replicas[b"b"].incarnation, root=root_of(model="m", weight_version=1))
    if other.get("capacity") == 3:  # with a request of its own, the second row would be more than half
        world.submit(3)
        assert len(world.runs(b"b")) == 1
    assert not ask_for_room(world, b"a", one, run)
    assert not ask_for_room(world, b"a", one, protocol.HandOut(77)), "no request of this number"


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_request_that_would_be_evicted_is_answered_whichever_side_is_lost(lost):
    world, one, run = short_of_blocks()
    other = world.replica(b"b", capacity=8, num_blocks=4)
    assert ask_for_room(world, b"a", one, run)
    world.core.unreachable(lost.encode())
    world.core.check()
    if lost == "b":
        world.core.receive(b"a", protocol.HandedOut(run.number, one, "x"))
    assert world.served(*((b"b", other) if lost == "a" else (b"a", one))) == [1]
    world.core.check()


def test_idle_replica_takes_requests_that_wait_for_a_full_one():
    world = World(policy="round_robin")
    world.client()
    one = world.replica(b"one", capacity=2)
    for number in range(1, 9):
        world.submit(number)
    runs = world.runs(b"one")
    assert len(runs) == 3 and world.core.stats()["waiting"] == 5
    world.replica(b"two", capacity=4)
    assert len(world.runs(b"two")) == 3  # until half of it is busy
    for run in runs:
        world.core.receive(b"one", protocol.Output(run.number, one, [Piece(0, 0, b"", "", "length")], True))
    assert world.core.stats()["waiting"] == 0
    world.core.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "nearest"}, "one of longest_prefix"),
        ({"alpha": 2.0}, "alpha is 2"),
        ({"max_queue": 0}, "max_queue is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0, it must be a finite number of seconds above 0"),
        ({"client_timeout_s": 1.0}, "client_timeout_s is 1.0, less than timeout_s, 2.0"),
        ({"key": b""}, "key is empty"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        World(**options)
