"""Every way a rank can go away, each in two fresh processes: python failure_case.py RESULTS.json TIMEOUT_S

One process imports everything once and forks the ranks of each case, AT_ONCE cases at a time: they mostly wait.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from typing import Any

import engine_ranks as ranks
from gloo_ranks import new_groups

from megatron_infer.errors import RankFailure
from megatron_infer.schedule.params import SamplingParams
from megatron_infer.testing.tiny import tiny_gpt

Case = tuple[str, str, int, str]
"""Phase, how, rank, and what divides the model: tp or pp."""
Run = Generator[None, None, dict[str, Any]]
AT_ONCE = 3
CASES: list[Case] = (
    [
        ("decode", "STUCK", 1, "pp"),  # the longest first
        ("decode", "STUCK", 0, "pp"),
    ]
    + [(phase, how, 1, "tp") for phase in ("prefill", "decode", "suspend", "update") for how in ("SIGKILL", "SIGSTOP")]
    + [
        ("decode", "SIGKILL", 0, "tp"),
        ("decode", "SIGSTOP", 0, "tp"),
        ("step", "SIGKILL", 1, "tp"),
        ("follow", "SIGSTOP", 0, "tp"),
        ("decode", "SIGKILL", 1, "pp"),
        ("decode", "SIGSTOP", 1, "pp"),
    ]
)
"""STUCK: a forward without end in a process that lives, and gives signs of it; it hears of that itself."""


class Bomb:
    """Sends this process `how` when the engine comes to `phase`."""

    def __init__(self, engine: Any, phase: str, how: str) -> None:
        self.engine, self.phase, self.how = engine, phase, how
        layers = engine.parts.adopted._lean
        layers[-1] = _Wired(layers[-1], self)
        engine.lifecycle.observers.append(self.observe)

    def layer_runs(self) -> None:
        if self.engine.parts.team.lockstep.phase.startswith(self.phase):
            self.go_off()

    def observe(self, what: str) -> None:
        if (self.phase, what) in (("suspend", "release the cache"), ("update", "the weights' checksums")):
            self.go_off()

    def go_off(self) -> None:
        if self.how == "STUCK":
            time.sleep(3600)
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
    if layout == "tp":
        model = ranks.part_of_model("attention", folder, rank, 2)
    else:
        new_groups(pipeline_model_parallel_size=2)
        model = tiny_gpt(**ranks.GPT, pipeline_model_parallel_size=2, pre_process=rank == 0, post_process=rank == 1)
    engine = ranks.make_engine(model, collective_timeout_s=timeout_s, check_invariants=False)
    engine.generate([list(range(9))], SamplingParams(max_tokens=3, ignore_eos=True))
    bomb = Bomb(engine, phase, how) if rank == victim else None
    started = time.monotonic()
    result: dict[str, Any] = {"error": None}
    try:
        if phase == "follow" and rank == 1:
            engine.follow()
        if rank == 0:
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


def run_case(case: Case, timeout_s: float) -> Run:
    """Gives up the thread wherever it would wait."""
    how, victim = case[1:3]
    folder = tempfile.mkdtemp()  # not a context: a forked rank would leave it, too
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                play(rank, folder, case, timeout_s)
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            # A rank that ends as scripts do: through the interpreter's own exit.
            sys.exit(code)
        pids.append(pid)
    began = time.monotonic()
    survivor, code = pids[1 - victim], None
    while code is None and time.monotonic() - began < 4 * timeout_s + 20:
        pid, status = os.waitpid(survivor, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else None
        yield
    exited = time.time()
    ended = time.monotonic() - began
    while how == "STUCK" and not os.path.exists(f"{folder}/result.{victim}") and time.time() < exited + 2 * timeout_s:
        yield
    for pid in (pids[victim], *([survivor] if code is None else [])):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        with open(f"{folder}/result.{1 - victim}", encoding="utf-8") as file:
            result = json.load(file)
        if how == "STUCK":
            with open(f"{folder}/result.{victim}", encoding="utf-8") as file:
                result["victim"] = json.load(file)["error"]
    except FileNotFoundError:  # it never came to an end
        result = {"error": None, "seconds": None}
    shutil.rmtree(folder)
    return result | {
        "case": case,
        "exit": code,
        "process_seconds": ended,
        "exit_seconds": exited - result.get("at", 0.0),
    }


def run_undisturbed(case: Case, timeout_s: float) -> Run:
    """A busy machine may keep a rank from a sign of life before its fault has come: then the case is played again."""
    for _ in range(3):
        result = yield from run_case(case, timeout_s)
        if result["error"] is None or case[0] in result["phase"]:
            break
    return result


def run_all(timeout_s: float) -> list[dict[str, Any]]:
    waiting, running, results = list(CASES), [], []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(run_undisturbed(waiting.pop(0), timeout_s))
        for run in list(running):
            try:
                next(run)
            except StopIteration as end:
                results.append(end.value)
                running.remove(run)
        time.sleep(0.02)
    return results


if __name__ == "__main__":
    results = run_all(float(sys.argv[2]))
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(results, out)
