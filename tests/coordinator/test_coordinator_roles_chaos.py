"""Engines with roles are killed, also in the midst of a parcel, and the roads of parcels break: each request gets one
right answer, and no block is held after."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import replica_child
from coordinator_case import coordinator, wait_for
from gloo_ranks import fork_server

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import parcel_transfer
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.parcel_transfer import ParcelTransfer
from megatron_infer.coordinator.replica import Replica

MINUTES = float(os.environ.get("CHAOS_MINUTES", "20"))
"""Of the slow case."""
BREAKS = ("lost", "changed", "slow", "gone", "killed")
"""What becomes of a part on its way, of one in so many."""
ONE_IN = 60


def serve(address: str, name: str, role: str, seed: int) -> None:
    """A process: an engine whose parcels go in parts of 2 KiB, on a road that breaks."""
    rng, send = random.Random(seed), ParcelTransfer._send
    parcel_transfer.PART_BYTES, parcel_transfer.TRANSFER_TIMEOUT_S = 2048, 3.0

    def on_a_bad_road(self: ParcelTransfer, peer: bytes, kind: bytes, content: bytes | memoryview) -> None:
        how = rng.choice(BREAKS) if rng.randrange(ONE_IN) == 0 else None
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "slow":
            time.sleep(rng.random())
        elif how == "changed" and len(content):
            changed = bytearray(content)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            content = bytes(changed)
        if how != "lost":
            send(self, peer, b"gone" if how == "gone" else kind, content)

    ParcelTransfer._send = on_a_bad_road
    Replica(replica_child.tiny(), address, name=name, role=role).run()


class Processes:
    """A process of each role, killed at random; one that has died starts again."""

    def __init__(self, address: str, roles: tuple[str, ...], rng: random.Random) -> None:
        self.address, self.roles, self.rng = address, roles, rng
        self.num_deaths = 0
        self.each = [self.start(number) for number in range(len(roles))]
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.wreck)

    def start(self, number: int):
        arguments = (self.address, f"c{number}", self.roles[number], self.rng.randrange(1 << 30))
        process = fork_server().Process(target=serve, args=arguments, daemon=True)
        process.start()
        return process

    def wreck(self) -> None:
        while not self.done.wait(self.rng.uniform(0.1, 2.0)):
            self.rng.choice(self.each).kill()
            time.sleep(0.1)
            self.renew()

    def renew(self) -> None:
        for number, process in enumerate(self.each):
            if not process.is_alive():
                self.num_deaths += 1
                self.each[number] = self.start(number)

    def calm(self) -> None:
        """What lives now goes on."""
        self.done.set()
        self.thread.join()

    def end(self) -> None:
        self.calm()
        for process in self.each:
            process.kill()
            process.join()


def some_requests(rng: random.Random, count: int):
    for _ in range(count):
        prompt = [rng.randrange(3, 120) for _ in range(rng.randint(4, 90))]
        how = {"max_tokens": rng.randint(1, 150), "seed": rng.randrange(1 << 30), "n": rng.choice((1, 1, 2, 3))}
        how |= rng.choice(({"ignore_eos": True}, {"stop_token_ids": range(0, 128, 40)}, {"repetition_penalty": 1.2}))
        yield prompt, SamplingParams(**how)


def leave_midway(client: InferenceClient, prompt, params) -> None:
    """A stream that its caller leaves after the first tokens."""
    stream = client.stream(prompt, params)
    next(stream)
    stream.close()


def tokens_of(output):
    assert output.error is None, output.error
    return [(one.token_ids, one.finish_reason) for one in output.outputs]


def check_answers_in_chaos(roles: tuple[str, ...], *, seconds: float, least: int, seed: int) -> None:
    """least: requests that are answered at least."""
    rng, alone = random.Random(seed), replica_child.tiny()
    with coordinator(timeout_s=10.0, role_min_prompt_tokens=8, max_attempts=10_000) as one:
        processes = Processes(one.address, roles, rng)
        try:
            with InferenceClient(one.address, timeout_s=120.0) as client:
                wait_for(lambda: len(client.stats()["replicas"]) == len(roles), 180)
                processes.thread.start()
                ends, num_done, num_left = time.monotonic() + seconds, 0, 0
                while num_done < least or time.monotonic() < ends:
                    work = list(some_requests(rng, 25))
                    futures = [client.submit(*each) for each in work]
                    leaving = threading.Thread(target=leave_midway, args=(client, *work[0]))
                    leaving.start()
                    want = alone.generate(*map(list, zip(*work, strict=True)))
                    found = [tokens_of(future.result(300)) for future in futures]
                    assert found == [tokens_of(output) for output in want]
                    leaving.join(300)
                    num_done, num_left = num_done + len(found), num_left + 1
                    one.core.check()
                processes.calm()
                processes.renew()
                wait_for(lambda: is_at_rest(client, len(roles)), 180)
                one.core.check()
                stats = client.stats()
                assert (stats["submitted"], stats["waiting"]) == (num_done + num_left, 0)
                assert stats["finished"] + num_left >= stats["submitted"] >= stats["finished"], "one was answered twice"
                assert stats["moved"] and stats["resent"] and processes.num_deaths > 1, (processes.num_deaths, stats)
                shown = (processes.num_deaths, "deaths", stats["moved"], "moves", stats["resent"], "again")
                print(num_done, "requests,", *shown)
        finally:
            processes.end()


def is_at_rest(client: InferenceClient, count: int) -> bool:
    """All engines are there and hold nothing; each checks its books after every step."""
    states = client.stats()["replicas"]
    free = [(one["stats"].get("num_free_blocks"), one["stats"].get("num_blocks")) for one in states]
    return len(states) == count and not any(one["running"] for one in states) and all(a == b != None for a, b in free)  # noqa: E711


@pytest.mark.long
def test_every_request_is_answered_once_while_engines_of_both_roles_die_and_roads_break():
    check_answers_in_chaos(("prefill_only", "decode_only"), seconds=6, least=100, seed=8)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
def test_every_request_is_answered_once_in_minutes_of_deaths_and_broken_roads():
    roles = ("prefill_only", "prefill_only", "decode_only", "decode_only", "decode_only")
    check_answers_in_chaos(roles, seconds=60 * MINUTES, least=500, seed=9)
