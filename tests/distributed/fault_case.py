"""Raises and kills one rank of a live job at a chosen call: python fault_case.py RESULTS.json CASES.json

One process imports everything and forks the ranks of each case. A case first runs one round of a training loop, to
count the calls at which the victim can fail; in the second round it fails at one of them.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import training_case
from engine_ranks import weights_of
from gloo_ranks import new_groups, stage_ends
from session_case import PARAMS, make_session, prompts
from test_virtual_stages import GPT, VPP2, chunks_of_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trainers import MegatronTrainer
from training_case import loss_over, sequences_of

from megatron_infer.distributed import lockstep
from megatron_infer.models.mcore_compat import parallel_state
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

LIMIT_S = 15.0
"""collective_timeout_s of the engine, and the timeout that the trainer gives its process groups."""
SLACK_S = 30.0
"""For noticing, and for a busy machine."""
AT_A_TIME = 4
KINDS = ("KILLED", "RAISES", "LIVES")
"""What the victim does: it is killed; it raises and its process ends; it raises and its process goes on."""
PHASES = ("generate", "reward", "training", "score", "score_and_backward", "loss", "step", "optimizer", "resume")
"""Where it does so: in a call, in code of the user (reward, loss, optimizer), or between the session's blocks."""
OF_USER = ("reward", "loss", "optimizer")
MODEL = {"num_layers": 4, "init_method_std": 0.2, "qk_layernorm": True}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERTS = training_case.EXPERTS | {"expert_model_parallel_size": 2, "num_layers": 2}
CP2 = {"context_parallel_size": 2, "position_embedding_type": "rope"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "TP2": (2, {TP: 2, "sequence_parallel": True}, {}),
    "PP2": (2, {PP: 2}, {}),
    "VPP2": (2, GPT | VPP2, {}),
    "EP2": (2, EXPERTS, {}),
    "EP2, own requests": (2, EXPERTS, {"dp_attention": True}),
    "CP2": (2, CP2, {}),
    "DP2": (2, {}, {}),
    "FSDP2": (2, {}, {}),
    "TP2 x PP2": (4, {TP: 2, PP: 2}, {}),
    "TP2 x DP2": (4, {TP: 2}, {}),
    "DP2, overlapped": (2, {}, {}),
    "CP2, FSDP2": (2, CP2, {}),
    "CP2 x EP2": (2, EXPERTS | CP2, {}),
    "CP2 x EP2, own requests": (2, EXPERTS | CP2, {"dp_attention": True}),
    "TP2 x CP2": (4, {TP: 2, "sequence_parallel": True} | CP2, {}),
    "TP2 x EP2": (4, EXPERTS | {TP: 2, "sequence_parallel": True}, {}),
    "PP2 x EP2": (4, EXPERTS | {PP: 2}, {}),
    "PP2 x EP2, own requests": (4, EXPERTS | {PP: 2}, {"dp_attention": True}),
}
"""Name -> ranks, settings of the model, options of the engine."""


@dataclass(frozen=True)
class Case:
    layout: str
    phase: str
    kind: str
    victim: int
    draw: int
    """Which of the phase's calls, modulo their number."""


class Calls:
    """Counts this rank's calls of collectives and rounds by phase; fails in one of them."""

    NAMES = (
        "all_reduce all_gather all_gather_into_tensor reduce_scatter_tensor broadcast send recv isend irecv "
        "batch_isend_irecv all_to_all_single all_gather_object barrier"
    ).split()

    def __init__(self, case: Case, folder: str, *, is_victim: bool) -> None:
        self.case, self._folder, self._is_victim = case, folder, is_victim
        self.phase, self.counts, self.is_armed = "", dict.fromkeys(PHASES, 0), False
        self.what = ""
        for name in self.NAMES if is_victim else ():
            function = getattr(dist, name)
            wrapped = self._counted(name, function)
            for module in list(sys.modules.values()):  # those that have imported it under any name too
                if getattr(module, "__name__", "").startswith(("torch.distributed", "megatron")):
                    for alias in [key for key, value in vars(module).items() if value is function]:
                        setattr(module, alias, wrapped)
        if is_victim and case.kind == "KILLED":
            lockstep.Lockstep._round = self._counted("a round", lockstep.Lockstep._round)  # type: ignore[method-assign]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.call(name)
            return function(*arguments, **named)

        return counted

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        outer, self.phase = self.phase, phase
        yield
        self.phase = outer

    def arm(self) -> None:
        """The next round has the fault."""
        start = PHASES.index(self.case.phase)  # the next phase where this one has no calls in the layout
        later = [phase for phase in PHASES[start:] + PHASES[:start] if self.counts[phase]]
        self.at = later[0] if later else ""
        most = self.counts[self.at] if later else 0
        self.number = 1 + self.case.draw % most if most else 0
        self.counts, self.is_armed = dict.fromkeys(PHASES, 0), True

    def call(self, name: str) -> None:
        if not self._is_victim or self.phase not in self.counts:
            return
        if (self.phase in OF_USER) != (name == "user"):
            return
        self.counts[self.phase] += 1
        if self.is_armed and self.phase == self.at and self.counts[self.phase] == self.number:
            self.is_armed = False
            with open(f"{self._folder}/off.tmp", "w", encoding="utf-8") as file:
                json.dump([time.time(), f"{self.at}: {name} {self.number}"], file)
            os.rename(f"{self._folder}/off.tmp", f"{self._folder}/off")
            if self.case.kind == "KILLED":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planned fault")


def trainer_of(layout: str) -> tuple[Any, Any]:
    """The model of a trainer's loop, and its optimizer."""
    settings = LAYOUTS[layout][1]
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "virtual_pipeline_model")
    sizes = {name: settings[name] for kind in names if (name := f"{kind}_parallel_size") in settings}
    new_groups(**sizes | ({PP: 2} if layout == "VPP2" else {}), distributed_timeout_minutes=LIMIT_S / 60)
    if "FSDP2" in layout:
        model = tiny_gpt(**MODEL | settings)
        mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(with_context_parallel=True), "cpu")
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    with cpu_shim(2):
        if "virtual_pipeline_model_parallel_size" in settings:
            plain = {key: value for key, value in settings.items() if "pipeline" not in key}
            model = chunks_of_rank(settings, 1, weights_of(tiny_gpt(**plain)))
        else:
            stage, stages = parallel_state.get_pipeline_model_parallel_rank(), settings.get(PP, 1)
            ends = stage_ends(stage, stages) if stages > 1 else {}  # a model of chunks has its own
            model = tiny_gpt(spec=lambda config: gpt_spec(config, pp_rank=stage), **MODEL | settings, **ends)
    with cpu_shim(1):
        trainer = MegatronTrainer(model, distributed="DP2" in layout, overlap="overlapped" in layout)
    return trainer.model, trainer.optimizer


def one_round(session: Any, optimizer: Any, calls: Calls, rank: int) -> None:
    """Generates, scores and trains; the parts that ranks do together have names."""
    sequences = sequences_of([12, 12, 8, 8], seed=1)
    inner = loss_over(sequences)

    def loss(scores: Any, indices: Any) -> Any:
        with calls.within("loss"):
            calls.call("user")
        return inner(scores, indices)

    step = optimizer.step

    def stepped(*arguments: Any) -> Any:
        with calls.within("optimizer"):
            calls.call("user")
        return step(*arguments)

    optimizer.step = stepped
    with calls.within("resume"), session.generating() as roll:
        with calls.within("generate"):
            roll.generate(prompts(2), PARAMS)
        with calls.within("reward"):
            calls.call("user")
    with calls.within("training"), cpu_shim(4), session.training():
        with calls.within("score"):
            session.score(sequences, micro_batch_tokens=24)
        with calls.within("score_and_backward"):
            session.score_and_backward(sequences, loss, micro_batch_tokens=24)
        with calls.within("step"):
            session.step(optimizer)
    optimizer.step = step


def play(rank: int, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    size, _, options = LAYOUTS[case.layout]
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    result: dict[str, Any] = {"error": None}
    calls = Calls(case, folder, is_victim=rank == case.victim)
    model, optimizer = trainer_of(case.layout)
    settings = {"collective_timeout_s": LIMIT_S, "check_invariants": False, **options}
    session = make_session(model, settings=settings)
    one_round(session, optimizer, calls, rank)
    dist.barrier()
    calls.arm()
    try:
        one_round(session, optimizer, calls, rank)
        one_round(session, optimizer, calls, rank)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "rank": getattr(error, "rank", None)}
        result["traceback"] = traceback.format_exc()
    result["at"], result["ranks"] = time.time(), session.ranks.ranks
    with open(f"{folder}/result.{rank}.tmp", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.rename(f"{folder}/result.{rank}.tmp", f"{folder}/result.{rank}")
    if rank == case.victim and case.kind == "LIVES":
        time.sleep(3600)
    if result["error"] is not None:
        sys.exit(1)


class Match:
    """The ranks of one case, forked."""

    def __init__(self, case: Case) -> None:
        self.case, self.folder = case, tempfile.mkdtemp()
        self.size = LAYOUTS[case.layout][0]
        self.pids = {rank: self._fork(rank) for rank in range(self.size)}
        self.began = time.monotonic()

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            play(rank, self.folder, self.case)
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 3
        sys.exit(code)  # as scripts end: through the interpreter's own exit

    def poll(self) -> bool:
        """Whether all ranks have ended that will."""
        for rank, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[rank]
        if set(self.pids) <= {self.case.victim}:
            return True
        off = self._read("off")
        late = off is not None and time.time() > off[0] + 2 * (LIMIT_S + SLACK_S)
        return late or time.monotonic() > self.began + 300

    def _read(self, name: str) -> Any:
        try:
            with open(f"{self.folder}/{name}", encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def result(self) -> dict[str, Any]:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        off = self._read("off")
        found = {rank: self._read(f"result.{rank}") for rank in range(self.size)}
        shutil.rmtree(self.folder)
        return {"case": asdict(self.case), "off": off, "ranks": found, "stuck": sorted(self.pids)}


def play_all(cases: list[Case]) -> list[dict[str, Any]]:
    waiting, running, results = list(cases), [], []
    while waiting or running:
        if waiting and len(running) < AT_A_TIME:
            running.append(Match(waiting.pop(0)))
        time.sleep(0.05)
        for match in [one for one in running if one.poll()]:
            running.remove(match)
            results.append(match.result())
            print(len(results), results[-1]["case"], results[-1]["off"], flush=True)
            for rank, one in results[-1]["ranks"].items():
                took = (
                    None if one is None or results[-1]["off"] is None else round(one["at"] - results[-1]["off"][0], 1)
                )
                print(
                    "   ",
                    rank,
                    took,
                    None if one is None else (one["error"] or "")[:300].replace("\n", " | "),
                    flush=True,
                )
    return results


if __name__ == "__main__":
    lockstep.ALONE_S = 2.0  # half of it is what a test waits for
    gc.freeze()  # what is imported is walked by no rank's collector
    with open(sys.argv[2], encoding="utf-8") as given:
        planned = [Case(**one) for one in json.load(given)]
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(play_all(planned), out)
