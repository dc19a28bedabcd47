"""One rank of a live job raises or is killed: every other rank ends in bounded time with its number and phase."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fault_case
import pytest
import torch.distributed as dist
from child_paths import python_path
from fault_case import KINDS, LAYOUTS, LIMIT_S, PHASES, SLACK_S, Case
from gloo_ranks import run_on_ranks

from megatron_infer.distributed.peer_reports import PeerReports, Report

LONG = [
    Case("TP2", "score", "LIVES", 1, 3),
    Case("PP2", "score_and_backward", "KILLED", 0, 5),
    Case("VPP2", "score", "RAISES", 1, 5),
    Case("EP2", "loss", "RAISES", 0, 1),
    Case("CP2", "score", "KILLED", 1, 3),
    Case("DP2", "reward", "RAISES", 1, 0),
    Case("TP2 x CP2", "resume", "KILLED", 1, 1),
    Case("TP2 x CP2", "generate", "LIVES", 3, 81),
    Case("PP2 x EP2, own requests", "generate", "RAISES", 0, 15),
]
BOUND_S = 2 * LIMIT_S + SLACK_S
"""A rank waits in a collective, and may then wait for the report of another that has waited in one."""


def drawn_cases(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    cases = []
    for _ in range(count):
        layout = draw.choice(list(LAYOUTS))
        victim = draw.randrange(LAYOUTS[layout][0])
        cases.append(Case(layout, draw.choice(PHASES), draw.choice(KINDS), victim, draw.randrange(10**6)))
    return cases


def run(cases: list[Case], folder: Path, *, timeout_s: float) -> list[dict[str, Any]]:
    (folder / "cases").write_text(json.dumps([asdict(case) for case in cases]))
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", fault_case.__file__, str(folder / "out"), str(folder / "cases")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out").read_text())


def complaint(result: dict[str, Any]) -> str:
    """What is wrong with the ends of a case's ranks; "": nothing."""
    victim = result["case"]["victim"]
    if result["off"] is None:
        return "the fault never came"
    began, _ = result["off"]
    for rank, end in result["ranks"].items():
        if int(rank) == victim:
            continue
        if end is None or end["error"] is None:
            return f"rank {rank} has no error"
        if end["at"] - began > BOUND_S:
            return f"rank {rank} waited for {end['at'] - began:.1f} s"
        names = {f"rank {victim} of the job", f"rank {victim}: ", f"rank {victim} failed while"}
        if victim in end["ranks"]:
            names |= {f"rank {end['ranks'].index(victim)} of the engine", f"rank {end['ranks'].index(victim)}: "}
        if not any(name in end["error"] for name in names):
            return f"rank {rank} does not name rank {victim}: {end['error']}"
    return ""


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_rank_that_raises_or_is_killed_is_named_on_all_others(tmp_path: Path) -> None:
    for result in run(LONG, tmp_path, timeout_s=270):
        assert complaint(result) == "", result


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_faults_at_random_calls(tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULT_SEED", "40"))
    results = run(drawn_cases(200, seed), tmp_path, timeout_s=7000)
    came = [result for result in results if result["off"] is not None]
    waits = [
        end["at"] - result["off"][0]
        for result in came
        for rank, end in result["ranks"].items()
        if end is not None and int(rank) != result["case"]["victim"]
    ]
    named = Counter((result["case"]["layout"], result["case"]["kind"], complaint(result) == "") for result in came)
    print(f"{len(came)} faults, seed {seed}; {len(waits)} other ranks waited {max(waits):.1f} s at most: {named}")
    assert len(came) > 180
    assert [(result, complaint(result)) for result in came if complaint(result)] == []


def on_job(rank: int, size: int, folder: Path) -> None:
    reports = PeerReports("127.0.0.1", [rank])
    dist.barrier()
    assert reports.find() is None
    dist.barrier()
    if rank == 1:
        reports.tell(Report(1, "score", "ValueError: a hook"))
    dist.barrier()
    if rank == 0:
        assert reports.find() == Report(1, "score", "ValueError: a hook")
    dist.barrier()
    if rank == 1:
        reports.tell(None)  # computes again
    dist.barrier()
    assert reports.find() is None
    dist.barrier()
    if rank == 1:
        del reports  # as its process would
    dist.barrier()
    if rank == 0:
        found = reports.find()
        assert found is not None and (found.rank, found.reason) == (1, "its process has ended")


def test_a_rank_of_the_job_reports_its_failure_or_is_found_gone(tmp_path: Path) -> None:
    run_on_ranks(on_job, 2, tmp_path)
