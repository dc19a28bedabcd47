"""Every way a rank can go away, each in two fresh processes: python failure_case.py RESULTS.json TIMEOUT_S PART

One process imports everything once and forks the ranks of each case.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

import engine_ranks as ranks
from gloo_ranks import new_groups, stage_ends

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RankFailure
from megatron_infer.testing.inspect import inspect, run_one_by_one
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

Case = tuple[str, str, int, str]
"""Phase, how, rank, and what divides the model: tp, pp or ep."""
CASES: list[Case] = [
    (phase, how, 1, "tp") for phase in ("prefill", "decode", "suspend", "update") for how in ("SIGKILL", "SIGSTOP")
] + [
    ("decode", "SIGKILL", 0, "tp"),
    ("decode", "SIGSTOP", 0, "tp"),
    ("step", "SIGKILL", 1, "tp"),
    ("follow", "SIGSTOP", 0, "tp"),
    ("decode", "SIGKILL", 1, "pp"),
    ("decode", "SIGSTOP", 1, "pp"),
    ("decode", "STUCK", 1, "pp"),
    ("decode", "STUCK", 0, "pp"),
    ("decode", "RAISES", 1, "ep"),
    ("decode", "SIGKILL", 0, "ep"),
    ("decode", "SIGSTOP", 1, "ep"),
    ("suspend", "SIGKILL", 1, "ep"),
]
"""STUCK: a forward without end in a process that lives, and gives signs of it; it hears of that itself. ep: each rank
has requests of its own."""
QUICK: list[Case] = [
    ("prefill", "SIGKILL", 1, "tp"),
    ("decode", "SIGSTOP", 1, "tp"),
    ("decode", "SIGKILL", 1, "pp"),
    ("decode", "RAISES", 1, "ep"),
]
REST = [case for case in CASES if case not in QUICK]
PARTS = (QUICK, REST[::2], REST[1::2])

AT_A_TIME = 4
"""Cases that go on together: most of a case is waiting for what will not come."""


class Bomb:
    """Sends this process `how` when the engine comes to `phase`."""

    def __init__(self, engine: Any, phase: str, how: str, folder: str) -> None:
        self.engine, self.phase, self.how, self.folder = engine, phase, how, folder
        run_one_by_one(engine, {-1: _Wired(inspect(engine).adopted.layers[-1], self)})
        engine.lifecycle.observers.append(self.observe)

    def layer_runs(self) -> None:
        if self.engine.rank_group.lockstep.phase.startswith(self.phase):
            self.go_off()

    def observe(self, what: str) -> None:
        if (self.phase, what) in (("suspend", "release the cache"), ("update", "the weights' checksums")):
            self.go_off()

    def go_off(self) -> None:
        open(f"{self.folder}/off", "w").close()
        if self.how == "STUCK":
            time.sleep(3600)
        if self.how == "RAISES":
            raise ValueError("raised by the case")
        os.kill(os.getpid(), getattr(signal, self.how))


class _Wired:
    def __init__(self, layer: Any, bomb: Bomb) -> None:
        self._layer, self._bomb = layer, bomb

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def run(self, *args: Any) -> Any:
        self._bomb.layer_runs()
        return self._layer.run(*args)


def play(rank: int, folder: str, case: Case, timeout_s: float) -> None:
    phase, how, victim, layout = case
    ranks.start_rank(rank, 2, folder)
    options: dict[str, Any] = {}
    if layout == "tp":
        model = ranks.part_of_model("attention", folder, rank, 2)
    elif layout == "ep":
        new_groups(expert_model_parallel_size=2)
        model, options = tiny_gpt(**ranks.GPT | EXPERTS, randomize=False), {"dp_attention": True}
    else:
        new_groups(pipeline_model_parallel_size=2)
        model = tiny_gpt(**ranks.GPT, pipeline_model_parallel_size=2, **stage_ends(rank, 2))
    engine = ranks.make_engine(model, collective_timeout_s=timeout_s, check_invariants=False, **options)
    engine.generate([list(range(9))], SamplingParams(max_tokens=3, ignore_eos=True))
    bomb = Bomb(engine, phase, how, folder) if rank == victim else None
    started = time.monotonic()
    result: dict[str, Any] = {"error": None}
    try:
        if phase == "follow" and rank == 1:
            engine.follow()
        if rank == 0 or layout == "ep":
            engine.add_request(list(range(30)), SamplingParams(max_tokens=40, ignore_eos=True))
        for step in range(10):
            if step == 4 and phase in ("step", "follow") and bomb is not None:
                bomb.go_off()  # between two steps
            engine.step()
        engine.suspend("offload")
        engine.resume()
        engine.set_weight_version(9)
        for _ in range(20):
            engine.step()
    except RankFailure as failure:
        result = {"error": str(failure), "rank": failure.rank, "phase": failure.phase}
    result["at"] = time.time()
    result["seconds"] = time.monotonic() - started
    with open(f"{folder}/result.{rank}.tmp", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.rename(f"{folder}/result.{rank}.tmp", f"{folder}/result.{rank}")


class Match:
    """The ranks of one case, forked; `look()` says where they are."""

    def __init__(self, case: Case, timeout_s: float) -> None:
        self.case, self.timeout_s = case, timeout_s
        self.folder = tempfile.mkdtemp()  # not a context: a forked rank would leave it, too
        self.pids = [self._fork(rank) for rank in range(2)]
        self.began, self.exited = time.monotonic(), 0.0
        self.code: int | None = None

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            play(rank, self.folder, self.case, self.timeout_s)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        # A rank that ends as scripts do: through the interpreter's own exit.
        sys.exit(code)

    @property
    def faulted(self) -> bool:
        """The bomb has gone off: from here on there is little but waiting."""
        return os.path.exists(f"{self.folder}/off") or self.ended

    @property
    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pids[1 - self.case[2]], os.WNOHANG)
            if pid:
                self.code, self.exited = os.waitstatus_to_exitcode(status), time.time()
        if self.code is None:
            return time.monotonic() - self.began > 4 * self.timeout_s + 20
        how, victim = self.case[1:3]
        told = how != "STUCK" or os.path.exists(f"{self.folder}/result.{victim}")
        return told or time.time() > self.exited + 2 * self.timeout_s

    def result(self) -> dict[str, Any]:
        how, victim = self.case[1:3]
        for pid in (self.pids[victim], *([self.pids[1 - victim]] if self.code is None else [])):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        try:
            with open(f"{self.folder}/result.{1 - victim}", encoding="utf-8") as file:
                result = json.load(file)
            if how == "STUCK":
                with open(f"{self.folder}/result.{victim}", encoding="utf-8") as file:
                    result["victim"] = json.load(file)["error"]
        except FileNotFoundError:  # it never came to an end
            result = {"error": None, "seconds": None}
        shutil.rmtree(self.folder)
        return result | {"case": self.case, "exit": self.code, "exit_seconds": self.exited - result.get("at", 0.0)}


def play_all(cases: list[Case], timeout_s: float) -> list[dict[str, Any]]:
    """Every case's result: the next one starts where all that go on have come to their fault, and wait.

    A busy machine may keep a rank from a sign of life before its fault has come: then the case is played again.
    """
    waiting = [(case, 1) for case in cases]
    running: list[tuple[Match, int]] = []
    results = []
    while waiting or running:
        if waiting and len(running) < AT_A_TIME and all(match.faulted for match, _ in running):
            case, tries = waiting.pop(0)
            running.append((Match(case, timeout_s), tries))
        time.sleep(0.02)
        for match, tries in [entry for entry in running if entry[0].ended]:
            running.remove((match, tries))
            result = match.result()
            if tries < 3 and result["error"] is not None and match.case[0] not in result["phase"]:
                waiting.append((match.case, tries + 1))
            else:
                results.append(result)
    return results


if __name__ == "__main__":
    gc.freeze()  # what is imported is walked by no rank's collector, neither while it runs nor when it ends
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(play_all(PARTS[int(sys.argv[3])], float(sys.argv[2])), out)
