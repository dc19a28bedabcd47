"""What clients of a busy server rely on: the short form of tools/bench/serve_load.py.

That answers are the engine's is in `test_openai_client.py`, what a full or ending server does in `test_pressure.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from functools import partial
from pathlib import Path

import pytest
from echo import EchoEngine, echo_tokens
from server_case import free_blocks, serving, wait_for

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))

import serve_load


def status(case):
    return case.http.get("/v1/status").json()


def work_of(count):
    """Prompts of token ids, and the text that an echo engine gives."""
    work = []
    for i in range(count):
        prompt, number = [i + 1, 7 * i % 200], 4 + i % 13
        body = {"prompt": prompt, "max_tokens": number, "temperature": 0}
        work.append((body, "".join(f"{token} " for token in echo_tokens(prompt, number))))
    return work


@pytest.mark.parametrize("clients", [50, pytest.param(200, marks=pytest.mark.long)])
def test_many_streaming_clients_are_each_answered_right(clients):
    with serving(EchoEngine(step_s=0.005), EchoEngine(step_s=0.005)) as case:
        before = free_blocks(case)
        done = asyncio.run(serve_load.load(case.url, work_of(97), clients=clients, seconds=clients / 100, spread_s=0.5))
        done.check()
        assert len(done.heard) >= clients and done.num_tokens == sum(len(one.text.split()) for one in done.heard)
        serve_load.wait_idle(partial(status, case))
        assert free_blocks(case) == before


def test_clients_that_are_killed_leave_no_block_held():
    engine = EchoEngine(step_s=0.02)
    with serving(engine) as case:
        before = free_blocks(case)
        body = {"prompt": [1, 2, 3], "max_tokens": 4000, "temperature": 0}
        serve_load.storm(case.url, body, partial(status, case), times=2, clients=40)
        wait_for(lambda: engine.stats()["num_requests"] == 0)
        serve_load.wait_idle(partial(status, case))
        assert free_blocks(case) == before


def test_slow_readers_do_not_slow_others():
    with serving(EchoEngine(step_s=0.01, num_blocks=1 << 15)) as case:
        slow = {"prompt": [1, 2, 3], "max_tokens": 3000, "temperature": 0, "return_token_ids": True}

        def quick():
            return serve_load.load(case.url, work_of(31), clients=4, seconds=1, spread_s=0.1)

        alone = asyncio.run(quick())
        beside = asyncio.run(serve_load.dawdle(case.url, slow, readers=20, during=quick))
        for one in (alone, beside):
            one.check()
        medians = [statistics.median(heard.e2e for heard in one.heard) for one in (alone, beside)]
        assert medians[1] < 3 * medians[0] + 0.2, medians
