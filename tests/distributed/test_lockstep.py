"""Rounds between ranks, which are threads here: what is agreed, what is named when it is not."""

from __future__ import annotations

import json
import socket
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.distributed import groups
from megatron_infer.distributed import lockstep as lockstep_module
from megatron_infer.distributed.groups import TimeLimit
from megatron_infer.distributed.heartbeat import Heartbeat
from megatron_infer.distributed.lockstep import Lockstep
from megatron_infer.distributed.rank_links import LinkClosed, RankLink, connect
from megatron_infer.errors import LockstepError, RankFailure, TransitionFailed
from megatron_infer.scheduler.step_plan import StepPlan


def gathering(size: int) -> tuple[threading.Barrier, Callable[[int, str], list[str]]]:
    """A barrier of `size` threads, and a function that gives each of them the texts of all."""
    barrier, texts = threading.Barrier(size), {}

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        everyone = [texts[r] for r in range(size)]
        barrier.wait()
        return everyone

    return barrier, gather


def play(
    size: int,
    act: Callable[[Lockstep], Any],
    *,
    timeout_s: float = 5.0,
    give_up: Callable[[int], bool] = lambda rank: True,
) -> list[Any]:
    """act(lockstep) on `size` ranks -> what each returned or raised. give_up: see `Watch`, with the rank."""
    barrier, gather = gathering(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        links = connect(rank, size, lambda text: gather(rank, text), timeout_s=20.0)
        lockstep = Lockstep(links, timeout_s=timeout_s, give_up=lambda: give_up(rank))
        try:
            results[rank] = act(lockstep)
        except BaseException as error:
            results[rank] = error
        barrier.wait()
        lockstep.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_everyone_gets_the_leaders_commands_and_anyones_flag():
    sent = [{"kind": "add", "x": 0.1 + 0.2}, {"ids": list(range(300_000))}]  # the second arrives in many pieces

    def act(lockstep: Lockstep) -> Any:
        met = lockstep.meet("step()", sent if lockstep.is_leader else None, arguments={"a": 1}, flag=lockstep.rank == 2)
        return met.commands, met.arguments, met.flag, lockstep.agree(False), lockstep.gather("t", str(lockstep.rank))

    assert play(3, act) == [(sent, {"a": 1}, True, False, ["0", "1", "2"])] * 3


def test_bytes_of_all_ranks_come_to_the_leader_and_back_in_pieces():
    """Of any number, none among them; calls go on next to them."""
    sizes = [3, 0, (5 << 20) + 7]

    def act(lockstep: Lockstep) -> Any:
        own = bytes([lockstep.rank + 1]) * sizes[lockstep.rank]
        collected = lockstep.collect("parts", own)
        assert lockstep.gather("t", "x") == ["x"] * 3
        return collected == [], lockstep.deal("parts", collected) == own, lockstep.agree(lockstep.rank == 1)

    assert play(3, act) == [(False, True, True), (True, True, True), (True, True, True)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_among_its_bytes_is_named(victim: int):
    def act(lockstep: Lockstep) -> Any:
        if lockstep.rank != victim:
            return lockstep.collect("parts", bytes(32 << 20))
        lockstep.gather("parts", str(32 << 20))
        if victim:
            lockstep._links.calls[0].send_body(bytes(1 << 20), wait_s=5.0)
        lockstep.close()
        return None

    survivor = play(2, act)[1 - victim]
    assert isinstance(survivor, RankFailure) and survivor.rank == victim


def padded(lockstep: Lockstep) -> None:
    for step, width in ((3, 8), (4, 8 << lockstep.rank)):
        plan = StepPlan(step=step)
        lockstep.planned(plan, check=True, shape_of=lambda plan, width=width: GraphShape(width, 0, width))


DISAGREEMENTS: dict[str, tuple[Callable[[Lockstep], Any], str, bool]] = {
    "calls": (
        lambda one: one.meet(["step()", "suspend()", "step()"][one.rank]),
        r"ranks are in different calls: rank 0: step\(\), rank 1: suspend\(\), rank 2: step\(\)$",
        True,
    ),
    "arguments": (
        lambda one: one.meet("suspend()", arguments={"mode": one.rank == 1}),
        r"suspend\(\) with other arguments on rank 1 than on rank 0",
        True,
    ),
    "padding": (padded, "step 4: .*padded to", False),
}
"""What ranks do, what is raised on each of them, and whether they go on after that."""


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_what_ranks_disagree_about_is_named_on_every_rank(name: str):
    act, message, goes_on = DISAGREEMENTS[name]

    def refused(lockstep: Lockstep) -> bool:
        with pytest.raises(LockstepError, match=message):
            act(lockstep)
        try:
            return bool(lockstep.meet("step()"))
        except LockstepError:
            return False

    assert play(3, refused) == [goes_on] * 3


def test_a_rank_that_follows_while_the_leader_is_in_no_call_is_refused():
    leader, follower = play(2, lambda one: one.agree(False, "a look") if one.is_leader else one.meet("follow()"))
    assert leader is False
    assert isinstance(follower, LockstepError) and "rank 0 is in a look where this rank follows" in str(follower)


def test_a_step_that_fails_while_another_rank_follows_names_the_rank_that_raised():
    def act(lockstep: Lockstep) -> None:
        lockstep.phase = "decode of step 4"
        if lockstep.rank == 1:
            lockstep.meet("follow()")
        cause = "ValueError: a draw" if lockstep.rank == 2 else ""
        lockstep.step_failed(ValueError("a draw" if cause else "stage 1"), 0.1, cause=cause)

    for error in play(3, act):
        assert isinstance(error, RankFailure) and "rank 2 of the engine failed" in str(error) and "a draw" in str(error)


def test_a_rank_that_left_by_an_error_is_not_waited_for_without_a_limit():
    ended = threading.Barrier(3)

    def act(lockstep: Lockstep) -> Any:
        lockstep._patient = True
        try:
            if lockstep.rank == 1:
                return lockstep.left("left generating() by ValueError: a reward")
            return lockstep.meet("generate()")
        finally:
            ended.wait(25)

    first, _, third = play(3, act, timeout_s=1.0)
    for error in (first, third):
        assert isinstance(error, RankFailure) and error.rank == 1 and "by ValueError: a reward" in str(error)


def test_together_fails_everywhere_with_the_rank_and_reason():
    def act(lockstep: Lockstep) -> None:
        with lockstep.together("offload"):
            if lockstep.rank == 1:
                raise MemoryError("no room")

    first, second, third = play(3, act)
    assert isinstance(second, MemoryError)
    for error in (first, third):
        assert isinstance(error, TransitionFailed) and str(error) == "rank 1: MemoryError: no room"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_closed_rank_is_named_by_all_others(victim: int):
    def act(lockstep: Lockstep) -> Any:
        lockstep.meet("step()")
        if lockstep.rank == victim:
            for link in (*lockstep._links.calls.values(), *lockstep._links.heartbeats.values()):
                link._socket.shutdown(socket.SHUT_RDWR)  # what the end of its process does
            return None
        lockstep.phase = "decode of step 4"
        with pytest.raises(RankFailure) as caught:
            for _ in range(50):
                lockstep.meet("step()")
        with pytest.raises(RankFailure):
            lockstep.agree(True)
        return caught.value.rank, caught.value.phase

    results = play(3, act)
    assert [result for rank, result in enumerate(results) if rank != victim] == [(victim, "decode of step 4")] * 2


def test_a_rank_that_lives_but_does_not_come_is_named_after_the_deadline():
    is_named = threading.Event()

    def act(lockstep: Lockstep) -> Any:
        if lockstep.rank == 1:
            return is_named.wait(20)
        with pytest.raises(RankFailure, match=r"it lives, in .*, but has not come to step") as caught:
            lockstep.meet("step()")
        is_named.set()
        return caught.value.rank

    assert play(2, act, timeout_s=1.0) == [1, True]


@pytest.mark.long
def test_whoever_follows_waits_as_long_as_the_leader_lives():
    def act(lockstep: Lockstep) -> str:
        if lockstep.is_leader:
            time.sleep(2.5)
            return lockstep.meet("resume()").call
        return lockstep.meet("follow()").call

    assert play(2, act, timeout_s=1.0) == ["resume()"] * 2


def test_a_failed_step_is_everyones_or_the_end():
    def same(lockstep: Lockstep) -> None:
        lockstep.step_failed(ValueError("shape"), 0.1 * lockstep.rank)

    assert play(2, same) == [None, None]

    def one(lockstep: Lockstep) -> None:
        if lockstep.rank == 1:
            lockstep.step_failed(MemoryError("no room"), 0.1)
        lockstep.meet("step()")

    def different(lockstep: Lockstep) -> None:
        lockstep.step_failed(MemoryError("no room") if lockstep.rank else OSError("timed out"), 5.0 - lockstep.rank)

    for act in (one, different):
        for error in play(2, act):
            assert isinstance(error, RankFailure) and error.rank == 1 and "no room" in str(error)


def test_a_failed_step_that_is_fatal_on_one_rank_is_the_end_of_all():
    """However alike the errors are: after a collective that timed out the group is of no use."""

    def act(lockstep: Lockstep) -> None:
        error = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
        lockstep.step_failed(error, 0.5 - 0.1 * lockstep.rank, fatal=lockstep.rank != 1)

    for error in play(3, act):
        assert isinstance(error, RankFailure) and error.rank == 2 and "Timed out" in str(error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_broke_off_is_named_at_once_and_waits_for_it_are_ended(victim: int):
    ended = [threading.Event() for _ in range(3)]
    asked: list[int] = []

    def give_up(rank: int) -> bool:
        asked.append(rank)
        if asked.count(rank) > 1:  # the first time there was nothing to end yet: asked again
            ended[rank].set()
        return ended[rank].is_set()

    def act(lockstep: Lockstep) -> None:
        lockstep.phase = "decode of step 4"
        if lockstep.rank == victim:
            lockstep.step_failed(MemoryError("no room"), 0.1, fatal=True, own=True)
        assert ended[lockstep.rank].wait(10), "it waits in a collective until then"
        lockstep.step_failed(RuntimeError("communicator was aborted"), 0.5, fatal=True)

    started = time.monotonic()
    for error in play(3, act, give_up=give_up, timeout_s=20.0):
        assert isinstance(error, RankFailure) and error.rank == victim and "no room" in str(error), error
    assert time.monotonic() - started < 15, "less than timeout_s"


def test_a_rank_whose_step_alone_raised_names_itself_and_not_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(lockstep_module, "ALONE_S", 0.3)
    for victim in (0, 1):

        def act(lockstep: Lockstep, victim: int = victim) -> None:
            if lockstep.rank == victim:
                lockstep.step_failed(MemoryError("no room"), 0.1, own=True)
            time.sleep(1.0)
            lockstep.check_alive()

        for error in play(2, act):
            assert isinstance(error, RankFailure) and error.rank == victim and "no room" in str(error), error


def test_a_rank_that_says_goodbye_ends_no_collectives():
    given_up: list[int] = []

    def act(lockstep: Lockstep) -> None:
        if lockstep.rank == 2:
            lockstep.close()
            return
        time.sleep(1.0)
        lockstep.check_alive(goodbyes=False)
        lockstep.check_alive()

    errors = play(3, act, timeout_s=0.8, give_up=lambda rank: bool(given_up.append(rank)) or True)
    assert all(isinstance(error, RankFailure) and "closed its engine" in str(error) for error in errors[:2])
    assert not given_up


def test_a_rank_that_dies_behind_the_goodbye_of_another_is_missed_all_the_same():
    """In the wait for a step that the one that left has done its part of, and the other has not."""
    given_up, left = [], threading.Event()

    def act(lockstep: Lockstep) -> None:
        if lockstep.rank == 2:
            lockstep.close()
            return
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                lockstep._watch.check()
                time.sleep(0.01)
            except RankFailure:
                break
        lockstep.check_alive(goodbyes=False)  # of the goodbye it has heard
        if lockstep.rank == 1:
            left.wait(20)
            lockstep._links.close()
            return
        left.set()
        while time.monotonic() < deadline:
            lockstep.check_alive(goodbyes=False)
            time.sleep(0.01)

    error = play(3, act, timeout_s=0.8, give_up=lambda rank: bool(given_up.append(rank)) or True)[0]
    assert isinstance(error, RankFailure) and error.rank == 1, error
    assert 0 in given_up


def test_a_goodbye_that_was_not_read_yet_is_told_from_a_death():
    """A pulse finds the link closed before its reader has seen what the other said last."""
    said: list[Any] = [None, {"bye": True}]

    def receive(wait_s: float) -> Any:
        if not said:
            raise LinkClosed("end of file")
        return said.pop(0)

    def send(message: Any, *, wait_s: float) -> None:
        raise LinkClosed("broken pipe")

    ended: list[int] = []
    link: Any = types.SimpleNamespace(receive=receive, send=send)
    watch = Heartbeat({1: link}, timeout_s=0.1, give_up=lambda: bool(ended.append(1)) or True)
    time.sleep(0.2)
    watch.check(goodbyes=False)
    assert watch.lost == (1, "it has closed its engine") and not said and not ended
    watch.close()


def test_collectives_are_ended_within_a_step_alone_and_on_nccl_alone(monkeypatch):
    calls: list[str] = []

    def backend(name: str) -> Any:
        note = {call: (lambda call=call: calls.append(f"{name} {call}")) for call in ("_group_start", "_group_end")}
        options = types.SimpleNamespace(_timeout=timedelta(seconds=600))
        return types.SimpleNamespace(
            options=options,
            _set_default_timeout=lambda limit: None,
            abort=lambda: calls.append(f"{name} abort"),
            **note,
        )

    configs = {"gloo": "cpu:gloo,cuda:gloo", "nccl a": "cuda:nccl", "nccl b": "cpu:gloo,cuda:nccl"}
    backends = {name: backend(name) for name in configs}
    monkeypatch.setattr(groups, "_backend", backends.__getitem__)
    monkeypatch.setattr(torch.distributed, "get_backend_config", configs.__getitem__)
    limit, on_cpu = TimeLimit(backends, 5.0), TimeLimit(["gloo"], 5.0)
    limit.enter()
    limit.leave()
    assert not limit.cut() and not limit.was_cut, "training's own"
    for one in (limit, on_cpu):
        one.enter()
        assert one.cut()
    for thread in threading.enumerate():
        if thread.name == "megatron_infer abort":
            thread.join(5)
    assert calls == ["nccl a _group_start", "nccl a abort", "nccl b abort", "nccl a _group_end"]
    assert limit.was_cut and not on_cpu.was_cut


def test_a_message_that_says_it_is_too_large_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = RankLink(socket.create_connection(server.getsockname()))
        here = RankLink(server.accept()[0])
    there.send("x" * 5000)
    with pytest.raises(LinkClosed, match="limit is 4,096"):
        here.receive(5.0, max_bytes=4096)
    here.close()
    there.close()


def test_a_stranger_at_the_port_is_sent_away():
    """Only who knows the token that the ranks exchanged becomes a rank."""
    offers: list[dict[str, Any]] = []
    barrier, texts = threading.Barrier(2), {}

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        everyone = [texts[0], texts[1]]
        if rank == 1 and everyone[0].startswith("{"):
            offers.append(json.loads(everyone[0]))
            intruder = RankLink(socket.create_connection(("127.0.0.1", offers[0]["port"])))
            intruder.send({"token": "guess", "rank": 1, "for": "calls"})
        barrier.wait()
        return everyone

    ends: list[Any] = [None, None]

    def run(rank: int) -> None:
        ends[rank] = connect(rank, 2, lambda text: gather(rank, text), timeout_s=5.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ends[1].calls[0].send("hello")
    assert ends[0].calls[1].receive(5.0) == "hello"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", offers[0]["port"]), timeout=1.0)  # the port is closed by now
    for end in ends:
        end.close()


def test_ranks_that_all_raise_errors_of_their_own_go_on_and_one_that_raises_alone_is_named(monkeypatch):
    monkeypatch.setattr(lockstep_module, "ALONE_S", 0.3)

    def all_raise(lockstep: Lockstep) -> bool:
        lockstep.raised(ValueError(f"figures of rank {lockstep.rank}"), 0.1, of_collective=False)
        return lockstep.agree(lockstep.rank == 1)

    assert play(2, all_raise) == [True, True]

    def one_is_alone(lockstep: Lockstep) -> None:
        lockstep.phase = "score"
        if lockstep.rank == 1:
            lockstep.raised(ValueError("a hook"), 0.1, of_collective=False)
        time.sleep(1.0)  # in a collective, until its limit
        lockstep.raised(RuntimeError("timed out"), 1.0, of_collective=True)

    for error in play(2, one_is_alone):
        assert isinstance(error, RankFailure) and str(error) == (
            "rank 1 of the engine failed in score: ValueError: a hook"
        )


def test_a_rank_that_raises_among_collectives_is_named_before_those_that_miss_it():
    def act(lockstep: Lockstep) -> None:
        lockstep.phase = "step"
        with lockstep.together("the reduction of gradients", has_collectives=True):
            if lockstep.rank == 1:
                raise ValueError("no memory")
            raise torch.distributed.DistNetworkError("reset")

    for error in play(3, act):
        assert isinstance(error, RankFailure) and error.rank == 1 and "no memory" in str(error), error


def test_what_a_rank_left_is_part_of_the_error_of_those_that_miss_it():
    def act(lockstep: Lockstep) -> None:
        if lockstep.rank == 1:
            lockstep.left("left training() by KeyError: 'reward'")
            lockstep.close()
            return
        lockstep.meet("score()")

    error = play(2, act)[0]
    assert isinstance(error, RankFailure) and error.rank == 1
    assert "left training() by KeyError: 'reward'" in str(error)


def test_a_leader_that_left_a_block_by_an_error_is_not_waited_for_as_one_that_waits_for_others():
    others = threading.Semaphore(0)

    def act(lockstep: Lockstep) -> float:
        started = time.monotonic()
        if lockstep.is_leader:
            lockstep.left("left generating() by KeyError: 'reward'")
            lives_until(others, count=5)
        else:
            with pytest.raises(RankFailure, match=r"rank 0 .* \(left generating\(\) by KeyError: 'reward'\), but"):
                lockstep.meet("suspend()")
            others.release()
        return time.monotonic() - started

    assert max(play(6, act, timeout_s=0.8)[1:]) < 3.0


def lives_until(others: threading.Semaphore, *, count: int) -> None:
    """Until so many other ranks have ended their wait for this one."""
    deadline = time.monotonic() + 4.0
    for _ in range(count):
        others.acquire(timeout=max(0.0, deadline - time.monotonic()))


def test_a_leader_that_left_a_block_by_an_error_and_waits_for_a_late_rank_is_not_named_for_that_rank():
    others = threading.Semaphore(0)

    def act(lockstep: Lockstep) -> None:
        if lockstep.rank == 2:
            lives_until(others, count=2)
            return
        lockstep.left("left generating() by ValueError: the same on both ranks")
        if lockstep.is_leader:
            time.sleep(0.5)
        try:
            lockstep.meet("suspend()")
        finally:
            others.release()

    for error in play(3, act, timeout_s=0.8)[:2]:
        assert isinstance(error, RankFailure) and error.rank == 2, error


def test_a_failure_that_some_ranks_find_is_named_where_all_ranks_meet():
    """Ranks 1 and 2 have a lockstep of their own too, as the ranks of one of several engines have."""
    _, gather = gathering(2)
    others = threading.Semaphore(0)

    def act(lockstep: Lockstep) -> None:
        if lockstep.rank == 0:
            try:
                lockstep.meet("score()")
            finally:
                others.release()
        place = lockstep.rank - 1
        links = connect(place, 2, lambda text: gather(place, text), timeout_s=20.0)
        pair = Lockstep(links, timeout_s=0.8, members=[1, 2])
        pair.share_failures([pair, lockstep])
        if lockstep.rank == 1:
            pair.meet("suspend()")
        lives_until(others, count=1)

    outside, finder, _ = play(3, act, timeout_s=20.0)
    assert isinstance(outside, RankFailure) and outside.rank == 2 and "has not come to suspend()" in str(outside)
    assert str(finder).startswith("rank 1 of the engine (rank 2 of the job) failed in start: it lives"), finder
