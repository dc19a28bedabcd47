"""Priorities: smaller numbers begin sooner and keep their memory longer; no request's tokens change."""

from __future__ import annotations

import pytest
from fake_device import make_request
from world import World

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RequestError
from megatron_infer.scheduler.waiting_queue import WaitingQueue


def asked(name, priority, num_prompt=6, max_new=9):
    prompt = [ord(name[0]) % 80 + i % 7 for i in range(num_prompt)]
    return make_request(name, prompt, max_new, stop_ids=frozenset(), params=SamplingParams(priority=priority))


def names(requests):
    return [request.id for request in requests]


def order_of(world, kind):
    return [name for name, what, _ in world.events if what == kind]


def test_smaller_priorities_overtake_and_equal_ones_keep_their_order():
    world = World(num_rows=1)
    world.add(asked("first", 0))
    world.step()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -2), ("e", 5), ("f", -2)):
        world.add(asked(name, priority))
    assert names(world.scheduler.waiting) == ["d", "f", "a", "c", "b", "e"]
    world.drain()
    assert order_of(world, "finish") == ["first", "d", "f", "a", "c", "b", "e"], "what has begun is not stopped"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("urgent", ["a", "b", "c"])
def test_the_smallest_priority_number_is_never_preempted(overlap, urgent):
    world = World(num_blocks=16, block_size=2, paused_limit=0, max_tokens=32, overlap=overlap)
    for name in "abc":
        world.add(asked(name, -1 if name == urgent else 4))
    world.drain()
    evicted = order_of(world, "evict")
    assert evicted and urgent not in evicted and urgent not in order_of(world, "pause")


@pytest.mark.parametrize("last", ["b", "c"])
def test_the_largest_priority_number_is_evicted_first(last):
    world = World(num_blocks=16, block_size=2, paused_limit=0, max_tokens=32)
    for name in "abc":
        world.add(asked(name, 9 if name == last else 1))
    world.drain()
    assert set(order_of(world, "evict")) == {last}


def test_an_evicted_request_waits_before_its_equals_and_behind_smaller_numbers():
    queue = WaitingQueue()
    requests = [asked(f"r{i}", priority) for i, priority in enumerate((0, 3, 0, 3, 3))]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    for index in (0, 1, 2):
        queue.append(requests[index])
    for index in (4, 3):
        requests[index].history.num_evictions = 1
        queue.insert_evicted(requests[index])
    assert names(queue.requests) == ["r0", "r2", "r3", "r4", "r1"]
    queue.remove(requests[1])
    queue.insert_group([requests[1]])
    assert names(queue.requests) == ["r0", "r2", "r3", "r4", "r1"]
    queue.insert_sorted([])
    assert names(queue.requests) == ["r0", "r2", "r1", "r3", "r4"]


@pytest.mark.parametrize("value", [1.5, None, True, 2**31, "1"])
def test_a_priority_is_an_integer(value):
    with pytest.raises(RequestError, match="priority is"):
        SamplingParams(priority=value)
