"""What a coordinator knows of adapters: from its commands, and after a restart from its replicas. Without sockets."""

from __future__ import annotations

import pytest
from test_coordinator_core import World

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import MAX_CHANGES, MAX_UNLOADED, CommandsInForce

ENDED = protocol.Answer(ok=True)


def loaded(name, digest, *, at=1.0, change="1"):
    """What a replica says of an adapter that it was told to load."""
    return {name: (at, {"name": name, "path": digest, "replace": True, "digest": digest, "change": change})}


def told(world, peer):
    """Commands that the replica gets: what it is told of which adapter."""
    return [(m.command, m.args["name"]) for m in world.take(peer) if isinstance(m, protocol.Command)]


def runs(world, peer):
    return [m.params.get("adapter") for m in world.take(peer) if isinstance(m, protocol.Run)]


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
    (sent,) = [m for m in world.take(b"one") if isinstance(m, protocol.Command)]
    world.core.receive(b"one", protocol.Done(sent.number, one, ENDED))
    world.replica(b"away", adapters={"a": "x"}, adapter_changes=loaded("a", "x", at=9e9))
    assert told(world, b"away") == [("unload_adapter", "a")] and told(world, b"one") == []


def test_a_replica_that_was_away_while_a_load_was_undone_undoes_it_when_it_is_back():
    world = World()
    client, incarnation = world.client(), world.replica(b"one")
    for number, command in ((1, "load_adapter"), (2, "undo_adapter")):
        args = {"name": "a", "path": "x", "change": "1"}
        world.core.receive(client, protocol.Control(number, command, args, 1.0))
        (sent,) = [m for m in world.take(b"one") if isinstance(m, protocol.Command)]
        world.core.receive(b"one", protocol.Done(sent.number, incarnation, ENDED))
    world.replica(b"away", adapters={"a": "x"}, adapter_changes=loaded("a", "x", at=9e9))
    assert told(world, b"away") == [("undo_adapter", "a")] and told(world, b"one") == []


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
        beat = protocol.Beat(incarnation, 1, 0, b"", 0, "running", 0.0, {}, {"a": "x"})
        world.core.receive(b"new", beat)
    answer = ENDED if ok else protocol.Answer(ok=False, kind="ConfigError", message="it is gone")
    world.core.receive(b"new", protocol.Done(command.number, incarnation, answer))
    assert runs(world, b"new") == ["a", "a"]
    assert world.core.stats()["replicas"][0]["adapters"] == (["a"] if ok else [])
    world.core.check()
    assert client


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
