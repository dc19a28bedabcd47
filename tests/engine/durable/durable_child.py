"""Processes that are killed: one that forks engines and reaps them, driven by messages (see test_durable_kill.py).

    in   {"path": ..., "log": ..., "kind": ..., "kill_at": null | n, "after_s": null | seconds, "save_after": null | n,
          "drafts": true | false}
    out  {"code": exit code}

A forked engine of a model of `kind` (see model_kinds.py) keeps its requests at `path` and notes in `log` what its
caller was told, each note after the call returned. With kill_at it kills itself around its n-th system call on files:
before it, or halfway through a write. With after_s it is killed so long after its first note. With save_after it takes
so many steps instead, writes the requests with their keys, values and states to `path`, and ends. With drafts it
verifies tokens that n-grams propose.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from durable_case import PROMPT, make_engine
from model_kinds import make_model

from megatron_infer.config.sampling_params import SamplingParams

NUM_REQUESTS = 8
EVERY_STEPS = 4
DRAFTS: dict[str, Any] = {"speculative": {"adaptive": False}}


def params_of(index: int) -> SamplingParams:
    if index % 3 == 2:
        return SamplingParams(n=2, max_tokens=5 + index, temperature=1.0, ignore_eos=True, logprobs=1)
    return SamplingParams(max_tokens=3 + 2 * index, temperature=float(index % 2), ignore_eos=True)


def prompt_of(index: int) -> list[int]:
    return PROMPT[index : index + 10 + index]


def serve(engine, path: str, note) -> None:
    """Add requests one by one while others run; store and acknowledge some outputs, abort one."""
    engine.keep_snapshots(path, every_steps=EVERY_STEPS)
    note("kept", "")
    finished = []
    for index in range(NUM_REQUESTS):
        note("accepted", engine.add_request(prompt_of(index), params_of(index)))
        for _ in range(2):
            finished += [output.request_id for output in engine.step() if output.finished]
        while finished:
            note("finished", finished.pop())
        if index == 5:
            note("finished", engine.abort("5").request_id)
            note("acknowledging", "0")
            engine.acknowledge(["0"])
            note("acknowledged", "0")
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                note("finished", output.request_id)


class Killer:
    """Counts os.replace, os.fsync and os.pwrite calls and ends the process at the one that was asked for."""

    def __init__(self, kill_at: int | None) -> None:
        self.calls, self._kill_at = 0, kill_at
        for name in ("replace", "fsync", "pwrite"):
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real):
        def call(*args):
            self.calls += 1
            if self.calls == self._kill_at:
                if name == "pwrite":
                    fd, content, at = args
                    real(fd, content[: len(content) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call


def run_child(model, order: dict) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def note(kind: str, request_id: str) -> None:
        os.write(log, json.dumps([kind, request_id]).encode() + b"\n")

    engine = make_engine(model, seed=4, overlap=True, **(DRAFTS if order["drafts"] else {}))
    if order["save_after"] is not None:
        for index in range(NUM_REQUESTS):
            engine.add_request(prompt_of(index), params_of(index))
        for _ in range(order["save_after"]):
            engine.step()
        engine.save_requests(order["path"], kv=True)
        return
    killer = Killer(order["kill_at"])
    serve(engine, order["path"], note)
    note("calls", str(killer.calls))
    if (found := engine.spec_decode_metrics()) is not None:
        note("accepted drafts", str(found.num_accepted))


def main(orders: Connection) -> None:
    """Until the other end of `orders` is closed."""
    torch.set_num_threads(1)  # no thread of ours is lost in a fork
    models: dict[str, torch.nn.Module] = {}
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        kind = order["kind"]
        model = models[kind] = models.get(kind) or make_model(kind)
        pid = os.fork()
        if not pid:
            try:
                run_child(model, order)
                os._exit(0)
            except BaseException as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                os._exit(1)
        if order["after_s"] is not None:
            deadline = time.monotonic() + 30
            while not (os.path.exists(order["log"]) and os.path.getsize(order["log"])) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(order["after_s"])
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        _, status = os.waitpid(pid, 0)
        orders.send({"code": os.waitstatus_to_exitcode(status)})
