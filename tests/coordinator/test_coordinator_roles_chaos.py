"""Engines with roles are killed, also in the midst of a parcel, and the roads of parcels break: each request gets one
right answer, and no block is held after."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import replica_child
from coordinator_case import coordinator, wait_for
from engine_ranks import make_engine, part_of_model, start_rank
from gloo_ranks import fork_server, new_groups, run_on_ranks

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import parcel_transfer
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.parcel_transfer import ParcelTransfer
from megatron_infer.coordinator.replica import Replica
from megatron_infer.errors import RankFailure

MINUTES = float(os.environ.get("CHAOS_MINUTES", "20"))
"""Of the slow case."""
BREAKS = ("lost", "changed", "slow", "gone", "killed")
"""What becomes of a part on its way, of one in so many."""
ONE_IN = 60


def serve(address: str, name: str, role: str, seed: int) -> None:
    """A process: an engine whose parcels go in parts of 2 KiB, on a road that breaks."""
    break_road(seed)
    Replica(replica_child.tiny(), address, name=name, role=role).run()


def serve_on_rank(rank: int, folder: str, address: str, name: str, role: str, seed: int) -> None:
    """One of two processes that are such an engine, until the other one has died."""
    with contextlib.suppress(RankFailure):
        start_rank(rank, 2, folder)
        engine = engine_on_rank(rank)
        if rank:
            engine.follow()
        else:
            break_road(seed)
            Replica(engine, address, name=name, role=role).run()


def engine_on_rank(rank: int):
    cache = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "max_sequence_length": 256}
    return make_engine(part_of_model("attention", "", rank, 2), collective_timeout_s=10, **cache)


def break_road(seed: int) -> None:
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


class Processes:
    """An engine of each role, one process of which is killed at random; an engine that has died starts again."""

    def __init__(self, one, roles: tuple[str, ...], rng: random.Random, folder: Path | None) -> None:
        """one: the coordinator. folder: of engines of two ranks each, which die only while all are there, as they take
        seconds to start; None: of one process each."""
        self.coordinator, self.roles, self.rng, self.folder = one, roles, rng, folder
        self.num_deaths = 0
        self.each = [self.start(number) for number in range(len(roles))]
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.wreck)

    def start(self, number: int):
        arguments = (self.coordinator.address, f"c{number}", self.roles[number], self.rng.randrange(1 << 30))
        calls = [(serve, arguments)]
        if self.folder is not None:
            own = self.folder / f"{number}.{self.num_deaths}"
            own.mkdir()
            calls = [(serve_on_rank, (rank, str(own), *arguments)) for rank in range(2)]
        processes = [fork_server().Process(target=target, args=args, daemon=True) for target, args in calls]
        for process in processes:
            process.start()
        return processes

    def wreck(self) -> None:
        while not self.done.wait(self.rng.uniform(0.1, 2.0)):
            if self.folder is not None and len(self.coordinator.core.stats()["replicas"]) < len(self.roles):
                self.renew()
                continue
            self.rng.choice(self.rng.choice(self.each)).kill()
            time.sleep(0.1)
            self.renew()

    def renew(self) -> None:
        """Start the engines again that have ended; a rank ends by itself when the other one has died."""
        for number, processes in enumerate(self.each):
            if not any(process.is_alive() for process in processes):
                self.num_deaths += 1
                self.each[number] = self.start(number)

    def calm(self) -> None:
        """What lives now goes on."""
        self.done.set()
        self.thread.join()

    def end(self) -> None:
        self.calm()
        for process in sum(self.each, []):
            process.kill()
            process.join()


def some_requests(rng: random.Random, count: int = 25):
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(3, 120) for _ in range(rng.randint(4, 90))]
        how = {"max_tokens": rng.randint(1, 150), "seed": rng.randrange(1 << 30), "n": rng.choice((1, 1, 2, 3))}
        how |= rng.choice(({"ignore_eos": True}, {"stop_token_ids": range(0, 128, 40)}, {"repetition_penalty": 1.2}))
        requests.append((prompt, SamplingParams(**how)))
    return requests


def leave_midway(client: InferenceClient, prompt, params) -> None:
    """A stream that its caller leaves after the first tokens."""
    stream = client.stream(prompt, params)
    next(stream)
    stream.close()


def tokens_of(output):
    assert output.error is None, output.error
    return [(one.token_ids, one.finish_reason) for one in output.outputs]


def check_answers_in_chaos(
    roles: tuple[str, ...],
    draw: Callable[[random.Random], list],
    answer: Callable[[list], list],
    *,
    seconds: float,
    least: int,
    seed: int,
    folder: Path | None = None,
) -> None:
    """draw(rng): some requests, as (prompt, params). answer(requests): their tokens. least: requests that are answered
    at least. folder: see `Processes`."""
    rng = random.Random(seed)
    with coordinator(timeout_s=10.0, role_min_prompt_tokens=8, max_attempts=10_000) as one:
        processes = Processes(one, roles, rng, folder)
        try:
            with InferenceClient(one.address, timeout_s=120.0) as client:
                wait_for(lambda: len(client.stats()["replicas"]) == len(roles), 180)
                processes.thread.start()
                ends, num_done, num_left = time.monotonic() + seconds, 0, 0
                while num_done < least or time.monotonic() < ends:
                    work = draw(rng)
                    futures = [client.submit(*each) for each in work]
                    leaving = threading.Thread(target=leave_midway, args=(client, *work[0]))
                    leaving.start()
                    want = answer(work)
                    assert [tokens_of(future.result(300)) for future in futures] == want
                    leaving.join(300)
                    num_done, num_left = num_done + len(work), num_left + 1
                    one.core.check()
                processes.calm()
                wait_for(lambda: processes.renew() or is_at_rest(client, len(roles)), 180)
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


def check_one_process_each(roles: tuple[str, ...], **how) -> None:
    alone = replica_child.tiny()

    def answer(work):
        return [tokens_of(output) for output in alone.generate(*map(list, zip(*work, strict=True)))]

    check_answers_in_chaos(roles, some_requests, answer, **how)


POOL = some_requests(random.Random(10), 80)
"""Of which engines of two ranks are asked some again and again."""


def answer_on_ranks(rank: int, size: int, folder: Path) -> None:
    new_groups(tensor_model_parallel_size=size)
    outputs = engine_on_rank(rank).generate(*map(list, zip(*POOL, strict=True)))
    if rank == 0:
        (folder / "answers.json").write_text(json.dumps([tokens_of(output) for output in outputs]))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_request_is_answered_once_while_engines_of_both_roles_die_and_roads_break():
    check_one_process_each(("prefill_only", "decode_only"), seconds=60, least=100, seed=8)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
def test_every_request_is_answered_once_in_minutes_of_deaths_and_broken_roads():
    roles = ("prefill_only", "prefill_only", "decode_only", "decode_only", "decode_only")
    check_one_process_each(roles, seconds=60 * MINUTES, least=500, seed=9)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
def test_every_request_is_answered_once_while_ranks_of_both_engines_die_and_roads_break(tmp_path):
    run_on_ranks(answer_on_ranks, 2, tmp_path)
    saved = json.loads((tmp_path / "answers.json").read_text())
    answers = {params.seed: [tuple(one) for one in each] for (_, params), each in zip(POOL, saved, strict=True)}

    def answer(work):
        return [answers[params.seed] for _, params in work]

    how = {"seconds": 6 * MINUTES, "least": 200, "seed": 11, "folder": tmp_path}
    check_answers_in_chaos(("prefill_only", "decode_only"), lambda rng: rng.sample(POOL, 25), answer, **how)
