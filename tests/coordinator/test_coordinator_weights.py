"""Which replicas have the weights in force: those that come back, and those that a new coordinator finds."""

from __future__ import annotations

from test_coordinator_core import World

from megatron_infer.coordinator import protocol

FILES = ["/weights/step", "f1"]
OLD, NEW = [1.0, [["/weights/old", "f0"]]], [2.0, [FILES]]


def weights(now, before=None, *, is_open=False):
    return {"now": now, "before": before, "is_open": is_open}


def commands(world, peer):
    return [(message.command, message.stamp) for message in world.commands(peer)]


def beat(world, peer, incarnation, stamp, version=0):
    world.beat(peer, incarnation, root=b"", version=version, weights=stamp)


def control(world, command, **args):
    world.core.receive(b"client", protocol.Control(1, command, args, 1.0))


def gets_requests(world, *peers):
    for number in range(1, 9):
        world.submit(number)
    got = [bool(world.runs(peer)) for peer in peers]
    for request in list(world.core._clients[b"client"].requests.values()):
        world.core.dispatch.cancel(request)
    return got


def test_replica_that_was_away_at_the_end_of_an_update_ends_it_in_the_same_way():
    for end, expected in (("cancel_weights", [("cancel_weights", 0.0)]), ("settle_weights", [("settle_weights", 0.0)])):
        world = World()
        world.client()
        control(world, end, **({"version": 1} if end == "cancel_weights" else {}))
        incarnation = world.replica(b"back", version=2, weights=weights(NEW, OLD))
        sent = world.commands(b"back")
        assert [(m.command, m.stamp) for m in sent] == expected
        assert sent[0].args == ({"version": 1} if end == "cancel_weights" else {})
        if end == "cancel_weights":
            assert gets_requests(world, b"back") == [False]
            beat(world, b"back", incarnation, OLD[0], version=1)
        assert gets_requests(world, b"back") == [True]
        assert [one["outdated"] for one in world.core.stats()["replicas"]] == [""]


def test_new_coordinator_leaves_an_update_open_until_its_end_is_decided():
    world = World()
    world.client()
    first = world.replica(b"first", version=2, weights=weights(NEW, OLD))  # it alone has finished it
    second = world.replica(b"second", version=1, weights=weights(OLD, is_open=True))
    assert commands(world, b"first") == [] and commands(world, b"second") == [("cancel_weights", 0.0)]
    assert gets_requests(world, b"first", b"second") == [True, False]
    control(world, "cancel_weights", version=1)
    number = world.commands(b"first")[0].number
    beat(world, b"first", first, OLD[0], version=1)
    world.core.receive(b"first", protocol.Done(number, first, protocol.Answer(ok=True)))
    number = world.commands(b"second")[0].number
    world.core.receive(b"second", protocol.Done(number, second, protocol.Answer(ok=True)))
    assert gets_requests(world, b"first", b"second") == [True, True]


def test_replica_with_another_update_of_the_same_version_is_not_taken_for_one_with_the_weights_in_force():
    world = World()
    world.client()
    world.replica(b"stale", version=2, weights=weights(OLD))
    assert gets_requests(world, b"stale") == [True]
    world.replica(b"fresh", version=2, weights=weights(NEW))
    assert commands(world, b"stale") == [("restore_weights", NEW[0])]
    world.core.unreachable(b"stale", "gone")
    incarnation = world.replica(b"stale", version=2, weights=weights(OLD))
    assert commands(world, b"stale") == [("restore_weights", NEW[0])]
    assert gets_requests(world, b"stale", b"fresh") == [False, True]
    beat(world, b"stale", incarnation, NEW[0], version=2)
    assert gets_requests(world, b"stale", b"fresh") == [True, True]


def test_replica_that_describes_its_weights_as_none_can_be_is_refused():
    for wrong in ({"now": 5}, {"now": [1.0, [["a"]]], "before": None, "is_open": False}, {"before": None}):
        world = World()
        world.replica(b"one", weights=wrong)
        assert [m.code for m in world.take(b"one")] == ["message"] and world.core.stats()["replicas"] == []


def carry_out(world, peer, incarnation, **answer):
    """The commands that a replica has got, each answered."""
    found = []
    for message in world.commands(peer):
        found.append((message.command, message.args))
        answered = protocol.Answer(**{"ok": True, "value": {"files": "f"}, **answer})
        world.core.receive(peer, protocol.Done(message.number, incarnation, answered))
    return found


def test_client_whose_update_is_refused_does_not_end_the_update_of_another():
    world = World()
    world.client()
    incarnation = world.replica(b"one", version=3, set_version=3)
    control(world, "begin_weights")
    control(world, "load_weights", path="/weights/first")
    carry_out(world, b"one", incarnation)
    other = world.client(b"other")
    world.core.receive(other, protocol.Control(1, "begin_weights", {}, 1.0))
    assert carry_out(world, b"one", incarnation, ok=False, kind="WrongState") == [("begin_weights", {})]
    world.core.unreachable(other, "gone")
    assert carry_out(world, b"one", incarnation) == []
    control(world, "load_weights", path="/weights/second")
    control(world, "finish_weights", version=4)
    control(world, "settle_weights")
    carry_out(world, b"one", incarnation)
    assert world.core.broadcasts.in_force.weights.now.sources == (("/weights/first", "f"), ("/weights/second", "f"))


def test_client_that_is_lost_within_an_update_leaves_no_engine_waiting_and_one_lost_after_it_changes_nothing():
    for told, expected in (
        (["pause", "begin_weights"], [("cancel_weights", {"version": 3}), ("unpause", {})]),
        (["begin_weights", "finish_weights"], [("cancel_weights", {"version": 3})]),
        (["pause", "begin_weights", "finish_weights", "settle_weights"], []),
        (["pause"], []),
    ):
        world = World()
        world.client()
        incarnation = world.replica(b"one", version=3, set_version=3)
        for command in told:
            control(world, command, **({"version": 4} if command == "finish_weights" else {}))
            assert [name for name, _ in carry_out(world, b"one", incarnation)] == [command]
        world.client(b"other")
        world.core.unreachable(b"other", "gone")
        assert carry_out(world, b"one", incarnation) == []
        world.core.unreachable(b"client", "gone")
        assert carry_out(world, b"one", incarnation) == expected
        assert world.core.broadcasts.in_force.weight_version == (4 if "settle_weights" in told else 3)


def test_sources_that_are_none_are_refused_and_the_coordinator_goes_on():
    world = World()
    world.client()
    for wrong in ({}, {"sources": 5}, {"sources": [["a"]]}, {"sources": None}):
        control(world, "restore_weights", **wrong)
        (result,) = world.take(b"client")
        assert result.answers["coordinator"].kind == "ConfigError"
    world.replica(b"one")
    assert gets_requests(world, b"one") == [True]
