"""What a coordinator knows of adapters: from its commands, and after a restart from its replicas. Without sockets."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import Future

import pytest
from echo import EchoEngine
from test_coordinator_core import World

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import MAX_CHANGES, MAX_UNLOADED, CommandsInForce
from megatron_infer.coordinator.commands import ReplicaCommands
from megatron_infer.coordinator.replica import Replica
from megatron_infer.engine.adapters import AdapterReading

ENDED = protocol.Answer(ok=True)


def loaded(name, digest, *, at=1.0, change="1"):
    """What a replica says of an adapter that it was told to load."""
    return {name: (at, {"name": name, "path": digest, "replace": True, "digest": digest, "change": change})}


def told(world, peer):
    """Commands that the replica gets: what it is told of which adapter."""
    return [(message.command, message.args["name"]) for message in world.commands(peer)]


def done(world, peer, incarnation, command, answer=ENDED):
    world.core.receive(peer, protocol.Done(command.number, incarnation, answer))
    world.core.check()


def runs(world, peer):
    return [run.params.get("adapter") for run in world.runs(peer)]


def test_a_restarted_coordinator_gives_all_replicas_what_one_was_told_to_load():
    world = World()
    world.replica(b"knows", adapters={"a": "x"}, adapter_changes=loaded("a", "x"))
    assert told(world, b"knows") == []
    world.replica(b"empty")
    assert told(world, b"empty") == [("load_adapter", "a")]
    world.replica(b"other", adapters={"a": "y", "b": "z"}, adapter_changes=loaded("b", "z"))
    assert told(world, b"other") == [("load_adapter", "a")], "its content of a is another one"
    assert told(world, b"knows") == told(world, b"empty") == [("load_adapter", "b")]


@pytest.mark.parametrize("first", ["loaded", "unloaded"])
def test_of_two_replicas_the_one_that_was_told_last_is_right(first):
    known = {"loaded": {"adapters": {"a": "x"}, "adapter_changes": loaded("a", "x", at=1.0)}}
    known["unloaded"] = {"adapter_changes": {"a": (2.0, None)}}
    second = {"loaded": "unloaded", "unloaded": "loaded"}[first]
    world = World()
    world.replica(first.encode(), **known[first])
    world.replica(second.encode(), **known[second])
    assert told(world, b"loaded") == [("unload_adapter", "a")] and told(world, b"unloaded") == []
    assert world.core.broadcasts.in_force.adapters["a"] == (2.0, None)


def test_what_a_coordinator_has_decided_itself_is_not_changed_by_what_a_replica_brings():
    world = World()
    client, one = world.client(), world.replica(b"one")
    world.core.receive(client, protocol.Control(1, "unload_adapter", {"name": "a", "change": "2"}, 1.0))
    (sent,) = world.commands(b"one")
    world.core.receive(b"one", protocol.Done(sent.number, one, ENDED))
    world.replica(b"away", adapters={"a": "x"}, adapter_changes=loaded("a", "x", at=9e9))
    assert told(world, b"away") == [("unload_adapter", "a")] and told(world, b"one") == []


def test_a_replica_that_was_away_while_a_load_was_undone_undoes_it_when_it_is_back():
    world = World()
    client, incarnation = world.client(), world.replica(b"one")
    for number, command in ((1, "load_adapter"), (2, "undo_adapter")):
        args = {"name": "a", "path": "x", "change": "1"}
        world.core.receive(client, protocol.Control(number, command, args, 1.0))
        (sent,) = world.commands(b"one")
        world.core.receive(b"one", protocol.Done(sent.number, incarnation, ENDED))
    world.replica(b"away", adapters={"a": "x"}, adapter_changes=loaded("a", "x", at=9e9))
    assert told(world, b"away") == [("undo_adapter", "a")] and told(world, b"one") == []


def test_an_undo_that_names_no_change_undoes_none_that_are_settled():
    told_before = CommandsInForce()
    told_before.record("undo_adapter", {"name": "b", "change": None})
    for undone in (list(told_before.undone), ["None"]):
        world = World()
        world.replica(b"one", adapters={"a": "x"}, adapter_changes=loaded("a", "x", change=None))
        world.replica(b"two", adapters={"a": "x"}, undone=undone)
        world.replica(b"three")
        assert told(world, b"one") == told(world, b"two") == []
        assert told(world, b"three") == [("load_adapter", "a")]
    assert not told_before.undone


@pytest.mark.parametrize("ok", [True, False])
def test_requests_of_an_adapter_wait_for_the_replica_that_is_about_to_have_it(ok):
    """A replica that was started again registers before it has the adapter; if it cannot, it refuses them itself."""
    world = World()
    client = world.client()
    lost = world.replica(b"lost", adapters={"a": "x"}, adapter_changes=loaded("a", "x"))
    world.submit(1, adapter="a")
    assert runs(world, b"lost") == ["a"] and lost
    world.core.unreachable(b"lost", "gone")
    incarnation = world.replica(b"new")
    (command,) = [m for m in world.take(b"new") if isinstance(m, protocol.Command | protocol.Run)]
    assert command.command == "load_adapter"
    assert world.core.stats()["replicas"][0]["adapters"] == ["a"], "its name is one of a model meanwhile"
    world.submit(2, adapter="a")
    world.submit(3)
    assert runs(world, b"new") == [None]
    if ok:
        world.beat(b"new", incarnation, root=b"", adapters={"a": "x"})
    answer = ENDED if ok else protocol.Answer(ok=False, kind="ConfigError", message="it is gone")
    world.core.receive(b"new", protocol.Done(command.number, incarnation, answer))
    assert runs(world, b"new") == ["a", "a"]
    assert world.core.stats()["replicas"][0]["adapters"] == (["a"] if ok else [])
    world.core.check()
    assert client


def test_a_replica_that_answers_for_another_one_ends_no_load_of_that_one():
    world = World()
    world.client()
    world.replica(b"lost", adapters={"a": "x"}, adapter_changes=loaded("a", "x"))
    world.core.unreachable(b"lost", "gone")
    other, incarnation = world.replica(b"other"), world.replica(b"new")
    (own,), (command,) = world.commands(b"other"), world.commands(b"new")
    for number in (own.number, command.number):
        answer = protocol.Answer(ok=False, kind="ConfigError", message="it is gone")
        world.core.receive(b"other", protocol.Done(number, other, answer))
    world.submit(1, adapter="a")
    assert not world.runs(b"other") and not world.runs(b"new"), "the new one is about to have the adapter"
    world.beat(b"new", incarnation, adapters={"a": "x"})
    world.core.receive(b"new", protocol.Done(command.number, incarnation, ENDED))
    assert runs(world, b"new") == ["a"]
    world.core.check()


def test_thousands_of_names_and_changes_leave_a_bounded_memory():
    in_force = CommandsInForce()
    for number in range(2 * MAX_UNLOADED):
        args = {"name": f"policy-{number}", "change": str(number)}
        in_force.record("load_adapter", args, {"digest": "x"})
        if number % 2:
            in_force.record("settle_adapter", args)
        in_force.record("unload_adapter", {**args, "change": f"{number}-"})
    assert len(in_force.adapters) == MAX_UNLOADED and len(in_force._before) <= MAX_CHANGES
    assert f"policy-{2 * MAX_UNLOADED - 1}" in in_force.adapters


FAILED = protocol.Answer(ok=False, kind="ConfigError", message="the directory has changed")


@pytest.mark.parametrize("last", ["beat", "answer"])
def test_a_replica_with_an_older_content_gets_no_requests_of_the_adapter(last):
    world = World(policy="round_robin")
    world.client()
    one = world.replica(b"one", capacity=8, adapters={"a": "new"}, adapter_changes=loaded("a", "new", at=2.0))
    old = world.replica(b"old", capacity=8, adapters={"a": "old"}, adapter_changes=loaded("a", "old", at=1.0))
    (load,) = world.commands(b"old")
    for number in range(4):
        world.submit(number, adapter="a")
    assert runs(world, b"one") == ["a"] * 4 and runs(world, b"old") == []
    done(world, b"old", old, load, FAILED)
    world.submit(5, adapter="a")
    (unload,) = world.take(b"old")
    assert (unload.command, unload.args) == ("unload_adapter", {"name": "a", "abort": True})
    assert runs(world, b"one") == ["a"]
    world.core.unreachable(b"one", "gone")
    assert runs(world, b"old") == [], "none has what is in force: they wait until this one has dropped what it has"
    if last == "beat":
        done(world, b"old", old, unload)
        assert runs(world, b"old") == [], "it is not known yet that the content is gone"
    world.beat(b"old", old)
    assert runs(world, b"old") == ["a"] * 5, "it refuses them itself"
    if last == "answer":
        done(world, b"old", old, unload)
    assert one


def test_requests_that_wait_at_a_replica_whose_content_grows_old_go_to_the_others():
    """Two engines get a replacement; the slower one has answered when the other's backlog is still long."""
    world = World(policy="round_robin")
    client, members = world.client(), {}
    for peer in (b"fast", b"slow"):
        members[peer] = world.replica(peer, capacity=1, adapters={"a": "x"}, adapter_changes=loaded("a", "x"))
    for number in range(8):
        world.submit(number, adapter="a")
    sent = {peer: len(runs(world, peer)) for peer in members}
    assert sent == {b"fast": 2, b"slow": 2}
    args = {"name": "a", "path": "y", "replace": True, "change": "2"}
    world.core.receive(client, protocol.Control(1, "load_adapter", args, 9.0))
    (load,) = world.commands(b"fast")
    world.beat(b"fast", members[b"fast"], adapters={"a": "y"})
    answer = protocol.Answer(ok=True, value={"digest": "y"})
    done(world, b"fast", members[b"fast"], load, answer)
    fast, slow = (next(one for one in world.core._registered() if one.peer == peer) for peer in members)
    assert len(fast.backlog) == 0 and len(slow.backlog) == 4
    (load,) = world.commands(b"slow")
    world.beat(b"slow", members[b"slow"], adapters={"a": "y"})
    done(world, b"slow", members[b"slow"], load, answer)
    world.submit(9, adapter="a")
    assert len(fast.backlog) + len(slow.backlog) == 5 and world.core.dispatch.num_waiting == 5


@pytest.mark.parametrize("leaves", ["dies", "drains"])
def test_requests_that_wait_for_a_load_go_on_when_the_replica_that_loads_leaves(leaves):
    world = World()
    world.client()
    world.replica(b"first", adapters={"a": "x"}, adapter_changes=loaded("a", "x"))
    cannot = world.replica(b"cannot")
    (load,) = world.commands(b"cannot")
    done(world, b"cannot", cannot, load, FAILED)
    world.core.unreachable(b"first", "gone")
    world.replica(b"loads")
    world.submit(1, adapter="a")
    assert runs(world, b"loads") == runs(world, b"cannot") == []
    if leaves == "dies":
        world.core.unreachable(b"loads", "gone")
    else:
        world.core.receive(b"loads", protocol.Goodbye(draining=True))
    assert runs(world, b"cannot") == ["a"], "it refuses the request itself"
    world.core.check()


@pytest.mark.parametrize("first", ["undid", "away"])
def test_a_load_that_an_earlier_coordinator_undid_is_not_carried_out_again(first):
    """One replica undid it; the other was away then and still has it."""
    known = {"undid": {"undone": ["1"]}, "away": {"adapters": {"a": "x"}, "adapter_changes": loaded("a", "x")}}
    world = World()
    for peer in sorted(known, key=lambda name: name != first):
        world.replica(peer.encode(), **known[peer])
    assert told(world, b"undid") == []
    assert told(world, b"away") == [("undo_adapter", "a")]
    assert world.core.broadcasts.in_force.adapters == {}


def test_a_replica_says_what_it_undid():
    commands = ReplicaCommands(None, {name: lambda **_: {"digest": "x"} for name in ("load_adapter", "undo_adapter")})
    for number, name in enumerate(("load_adapter", "undo_adapter")):
        command = protocol.Command(number, 1, name, {"name": "a", "change": "7"}, 5.0, 3.0)
        assert commands.execute(None, command, time.monotonic(), lambda: None).ok
    assert list(commands.in_force.undone) == ["7"] and commands.in_force.adapters == {}


def test_a_load_that_is_recorded_again_is_undone_to_what_was_in_force_before():
    in_force = CommandsInForce()
    in_force.record("load_adapter", {"name": "a", "change": None}, {"digest": "x"})
    for _ in range(2):
        in_force.record("load_adapter", {"name": "a", "change": "7"}, {"digest": "y"})
    in_force.record("undo_adapter", {"name": "a", "change": "7"})
    assert in_force.adapters["a"][1]["digest"] == "x"


def test_the_order_of_changes_is_the_coordinators_whatever_clocks_say(monkeypatch):
    """Replicas keep the stamps that commands have; a coordinator's are above all that it has heard of."""
    clocks = itertools.count(1000.0, -10.0)  # back with every look, also of a thread that logs
    monkeypatch.setattr("megatron_infer.coordinator.broadcast.time.time", lambda: next(clocks))
    world, stamps = World(), []
    client, one = world.client(), world.replica(b"one", adapter_changes={"b": (5000.0, None)})
    replica = ReplicaCommands(None, {"load_adapter": lambda **given: {"digest": given["path"]}})
    for number, path in enumerate(["x", "y"]):
        args = {"name": "a", "path": path, "change": str(number), "replace": True}
        world.core.receive(client, protocol.Control(number, "load_adapter", args, 9.0))
        (command,) = world.commands(b"one")
        answer = replica.execute(None, command, time.monotonic(), lambda: None)
        done(world, b"one", one, command, answer)
        stamps.append(command.stamp)
    assert 5000.0 < stamps[0] < stamps[1]
    assert replica.in_force.adapters["a"][0] == world.core.broadcasts.in_force.adapters["a"][0] == stamps[1]
    world.begin()  # another coordinator, which hears first of a replica that has missed the second change
    world.replica(b"away", adapters={"a": "x"}, adapter_changes=loaded("a", "x", at=stamps[0]))
    world.replica(b"one", adapters={"a": "y"}, adapter_changes=replica.in_force.adapters)
    assert told(world, b"one") == [] and told(world, b"away") == [("load_adapter", "a")]
    assert world.core.broadcasts.in_force.adapters["a"][1]["path"] == "y"


def test_what_was_read_for_a_coordinator_that_is_lost_is_given_up():
    """It would hold a whole adapter, and count against the limit of readings, until a next command comes."""
    given_up, futures = [], [Future() for _ in range(2)]
    readings = [AdapterReading(number=k, path=None, future=future) for k, future in enumerate(futures)]
    own = {"read_adapter": lambda **given: readings[int(given["name"])], "forget_reading": given_up.append}
    loads = []
    replica = Replica(
        EchoEngine(), "inproc://none", adapter_commands=own | {"load_adapter": lambda **_: loads.append(1)}
    )
    for number in range(2):
        command = protocol.Command(number, 0, "load_adapter", {"name": str(number), "path": "x"}, 60.0)
        replica._apply(time.monotonic(), command)
    assert len(replica._commands._queues) == 2 and not given_up
    replica._apply(time.monotonic(), 0)
    replica.connection.close()
    assert given_up == readings and not replica._commands._queues
    replica._incarnation = 2
    for future in futures:
        future.set_result(None)
    for came, message in list(replica._inbox):
        replica._apply(came, message)
    assert not loads and not replica._commands._queues, "a command of the lost coordinator is not carried out"


@pytest.mark.parametrize("stamp", [float("nan"), float("inf")])
def test_a_stamp_that_no_other_could_be_above_is_refused(stamp):
    world = World()
    world.replica(b"odd", adapter_changes=loaded("a", "x", at=stamp))
    (refused,) = [m for m in world.take(b"odd") if isinstance(m, protocol.Refused)]
    assert "stamps are no finite numbers" in refused.message
    assert world.core.broadcasts.in_force.adapters == {} and world.core.broadcasts.in_force.stamp() < 1e11


class _Engine:
    """A replica that does what it is told, with a list in the place of a thread."""

    def __init__(self):
        self.adapters, self.reported, self.before = {}, {}, {}
        self.book, self.commands, self.runs, self.incarnation = CommandsInForce(), [], [], 0

    def carry_out(self, command):
        args, value = command.args, {}
        name, had = args["name"], self.adapters.get(args["name"])
        if command.command in ("load_adapter", "unload_adapter"):
            self.before.setdefault(args.get("change"), (name, had))
            self.adapters.pop(name, None)
        if command.command == "load_adapter":
            if args.get("digest") not in (None, args["path"]):
                return FAILED
            self.adapters[name], value = args["path"], {"digest": args["path"]}
        elif command.command == "undo_adapter" and (found := self.before.pop(args["change"], None)) is not None:
            self.adapters |= {found[0]: found[1]}
            self.adapters = {one: digest for one, digest in self.adapters.items() if digest is not None}
        self.book.record(command.command, args, value, stamp=command.stamp)
        return protocol.Answer(ok=True, value=value)


class _Fleet:
    """Three of them that come and go, under coordinators that are lost and started again."""

    def __init__(self, seed):
        self.random, self.num_runs = random.Random(seed), 0
        self.world = World(policy=self.random.choice(["round_robin", "longest_prefix"]))
        self.world.client()
        self.engines = {f"r{number}".encode(): _Engine() for number in range(3)}

    def live(self):
        return [peer for peer, engine in self.engines.items() if engine.incarnation]

    def deliver(self):
        """No request comes to an engine that has reported an older content of its adapter."""
        is_outdated = self.world.core.broadcasts.in_force.is_outdated
        for peer in self.live():
            engine = self.engines[peer]
            for message in self.world.take(peer):
                if isinstance(message, protocol.Command):
                    engine.commands.append(message)
                elif isinstance(message, protocol.Run):
                    engine.runs.append(message)
                    self.num_runs += 1
                    name = message.params.get("adapter")
                    assert name not in engine.reported or not is_outdated(name, engine.reported[name]), (peer, name)
        self.world.core.check()

    def join(self, peer):
        engine = self.engines[peer]
        engine.commands, engine.runs, engine.reported = [], [], dict(engine.adapters)
        book = {"adapter_changes": dict(engine.book.adapters), "undone": list(engine.book.undone)}
        engine.incarnation = self.world.replica(peer, adapters=engine.reported, **book)

    def leave(self, peer):
        self.engines[peer].incarnation = 0
        self.world.core.unreachable(peer, "gone")

    def restart(self):
        self.world.begin()
        self.world.inboxes.clear()
        self.world.client()
        for engine in self.engines.values():
            engine.incarnation = 0

    def execute(self, peer, *, may_fail):
        engine = self.engines[peer]
        command = engine.commands.pop(0)
        answer = FAILED if may_fail and self.random.random() < 0.15 else engine.carry_out(command)
        engine.reported = dict(engine.adapters)
        self.world.beat(peer, engine.incarnation, adapters=engine.reported)
        self.deliver()
        self.world.core.receive(peer, protocol.Done(command.number, engine.incarnation, answer))

    def finish(self, peer):
        engine = self.engines[peer]
        number = engine.runs.pop(0).number
        self.world.core.receive(peer, protocol.Output(number, engine.incarnation, [], True))

    def change(self, number, changes):
        """A client's command; it undoes or settles the latest load."""
        command = self.random.choice(["load_adapter"] * 4 + ["unload_adapter", "undo_adapter", "settle_adapter"])
        args = {"name": self.random.choice("ab")}
        if command == "load_adapter":
            changes.append(str(number))
            args |= {"path": self.random.choice("xyz"), "replace": True, "change": changes[-1]}
        elif command in ("undo_adapter", "settle_adapter"):
            args["change"] = changes.pop() if changes else "none"
        self.world.core.receive(b"client", protocol.Control(number, command, args, 5.0))


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_whatever_happens_no_older_content_answers_and_no_request_waits_for_ever(first):
    num_runs = 0
    for seed in range(first, first + 100):
        fleet, changes = _Fleet(seed), []
        draw = fleet.random
        for number in range(80):
            live, event = fleet.live(), draw.random()
            away = [peer for peer in fleet.engines if peer not in live]
            told = [peer for peer in live if fleet.engines[peer].commands]
            busy = [peer for peer in live if fleet.engines[peer].runs]
            if event < 0.12 and away:
                fleet.join(draw.choice(away))
            elif event < 0.18 and live:
                fleet.leave(draw.choice(live))
            elif event < 0.2:
                fleet.restart()
            elif event < 0.35:
                fleet.change(number, changes)
            elif event < 0.6:
                fleet.world.submit(number, adapter=draw.choice(["a", "b", None]))
            elif event < 0.75 and busy:
                fleet.finish(draw.choice(busy))
            elif told:
                fleet.execute(draw.choice(told), may_fail=True)
            fleet.deliver()
        for peer in [one for one in fleet.engines if one not in fleet.live()]:
            fleet.join(peer)
            fleet.deliver()
        while ready := [peer for peer, engine in fleet.engines.items() if engine.commands or engine.runs]:
            if fleet.engines[ready[0]].commands:
                fleet.execute(ready[0], may_fail=False)
            else:
                fleet.finish(ready[0])
            fleet.deliver()
        assert fleet.world.core.dispatch.num_waiting == 0, seed
        num_runs += fleet.num_runs
    assert num_runs > 100


def update_of_adapter(record, *, number=None, end="settle_weights"):
    """The commands of an update whose tensors are those of adapter a."""
    record("begin_weights", {"adapter": {"name": "a", "config": {}, "number": number}}, None, stamp=3.0)
    record("receive_weights", {"group": "g"}, None, stamp=4.0)
    record("finish_weights", {"version": 0}, {"version": 0}, stamp=5.0)
    retires = None if number is None else "before"
    value = {"name": "a", "digest": "x", "retires": retires} if end == "settle_weights" else None
    if end is not None:
        record(end, {}, value, stamp=6.0)


def test_an_update_of_an_adapter_leaves_the_weights_in_force_and_what_it_retires_is_unloaded():
    in_force = CommandsInForce()
    before = in_force.weights.now
    update_of_adapter(in_force.record, end="cancel_weights")
    assert in_force.adapters == {} and in_force.weights.now == before and in_force.weights.is_settled
    update_of_adapter(in_force.record, number=1)
    assert in_force.adapters == {"a": (6.0, {"name": "a", "digest": "x"}), "before": (6.0, None)}
    assert in_force.weights.now == before and in_force.weights.is_settled and in_force.weight_version == 0
    in_force.record("begin_weights", {}, None, stamp=7.0)
    in_force.record("finish_weights", {"version": 1}, {"version": 1}, stamp=8.0)
    assert in_force.weights.now.stamp == 8.0, "the next one is of the model"


def test_a_replica_that_lacks_tensors_of_an_adapter_is_not_told_to_load_it_and_unloads_an_older_content():
    world = World(policy="round_robin")
    world.client()
    change = {"a": (6.0, {"name": "a", "digest": "x"})}
    world.replica(b"has", capacity=8, adapters={"a": "x"}, adapter_changes=change)
    world.replica(b"empty", capacity=8)
    world.replica(b"old", capacity=8, adapters={"a": "y"}, adapter_changes=loaded("a", "y", at=1.0))
    assert told(world, b"has") == told(world, b"empty") == []
    assert told(world, b"old") == [("unload_adapter", "a")]
    for number in range(3):
        world.submit(number, adapter="a")
    assert runs(world, b"has") == ["a"] * 3


def test_a_replica_that_comes_back_within_an_update_of_an_adapter_gives_it_up():
    own, world = CommandsInForce(), World()
    update_of_adapter(own.record, end=None)
    world.client()
    world.replica(b"back", weights=own.weights.to_dict())
    assert [message.command for message in world.commands(b"back")] == ["cancel_weights"]


@pytest.mark.parametrize("order", itertools.permutations((b"has", b"again", b"late")), ids=str)
def test_a_replica_that_joins_within_an_update_of_an_adapter_drops_the_content_of_before(order):
    """It has nothing to settle, whoever answers first; one that was started again retires nothing."""
    world, own = World(policy="round_robin"), {}
    client = world.client()
    for peer in (b"has", b"again"):
        change = loaded("a", "old") | loaded("before", "b")
        own[peer] = world.replica(peer, adapters={"a": "old", "before": "b"}, adapter_changes=change)
    commands = (("begin_weights", {"adapter": {"name": "a"}}), ("finish_weights", {"version": 0}))
    for number, (name, args) in enumerate(commands):
        world.core.receive(client, protocol.Control(number, name, args, 9.0))
        for peer in own:
            done(world, peer, own[peer], world.commands(peer)[-1])
    own[b"late"] = world.replica(b"late", adapters={"a": "old", "before": "b"})
    world.commands(b"late")
    world.core.receive(client, protocol.Control(2, "settle_weights", {}, 9.0))
    values = {b"has": {"name": "a", "digest": "x", "retires": "before"}, b"late": None}
    values[b"again"] = values[b"has"] | {"retires": None}
    for peer in order:
        (settle,) = world.commands(peer)
        done(world, peer, own[peer], settle, protocol.Answer(ok=True, value=values[peer]))
    in_force = world.core.broadcasts.in_force.adapters
    assert in_force["a"][1] == {"name": "a", "digest": "x"} and in_force["before"][1] is None
    assert told(world, b"has") == told(world, b"again") == []
    assert told(world, b"late") == [("unload_adapter", "a"), ("unload_adapter", "before")]


@pytest.mark.security
@pytest.mark.parametrize("value", [{}, {"name": "a"}, [1], "a", 3])
def test_what_a_replica_says_of_a_settled_update_is_no_adapter_where_it_names_none(value):
    world = World()
    client, one = world.client(), world.replica(b"one")
    world.core.receive(client, protocol.Control(1, "settle_weights", {}, 9.0))
    (settle,) = world.commands(b"one")
    done(world, b"one", one, settle, protocol.Answer(ok=True, value=value))
    assert world.core.broadcasts.in_force.adapters == {}
