"""`serve` under torchrun: every group of tp x pp x ep ranks is one engine; rank 0 starts coordinator and HTTP besides.

rank 0      coordinator and HTTP processes, and its part of replica 0
leaders     Replica.run(): the first rank of each engine talks to the coordinator
others      engine.follow()

When HTTP has ended (SIGTERM lets running requests end first), rank 0 says so in the rendezvous store and all leave.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import torch

from megatron_infer.comm.backends import home_of
from megatron_infer.comm.groups import build_groups
from megatron_infer.config.inference import machine_config
from megatron_infer.coordinator.replica import Replica
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.description_shape import shape_of
from megatron_infer.model_loader.sources import open_source
from megatron_infer.rl.remote_weights import RemoteWeights
from megatron_infer.server.launch import CARD_TIMEOUT_S, STOP_S, EngineOptions, make_card, told_by
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.supervisor import Role, Supervisor

MEETING, ENDED = "megatron_infer/serve", "megatron_infer/serve/ended"
LOOK_S = 0.2


def serve_rank(options: EngineOptions, settings: ServerConfig, *, dp: int, tp: int, pp: int, ep: int) -> None:
    """This rank's part, until SIGTERM. Raises on every rank what stands in the way."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if dp * tp * pp * ep != world:
        raise ConfigError(
            f"{world} processes, but dp x tp x pp x ep = {dp} x {tp} x {pp} x {ep} = {dp * tp * pp * ep}; "
            f"start as many (torchrun --nproc-per-node {dp * tp * pp * ep})"
        )
    groups = build_groups(tensor_parallel=tp, pipeline_parallel=pp, expert_parallel=ep)
    store = torch.distributed.distributed_c10d._get_default_store()
    frontage = Frontage(options, settings) if rank == 0 else None
    try:
        if frontage is not None:
            store.set(MEETING, json.dumps(frontage.open()))
        store.wait([MEETING], timedelta(seconds=CARD_TIMEOUT_S))
        meeting = json.loads(store.get(MEETING))
        engine = _engine(options, groups)
        rank_group, weights = engine.rank_group.groups, RemoteWeights(engine)
        if not rank_group.is_leader:
            _ignore_signals()
            engine.follow(weights.followed())
            return
        key = None if meeting["key"] is None else meeting["key"].encode()
        name, commands = f"replica{rank_group.dp_rank}", weights.commands()
        replica = Replica(engine, meeting["address"], name=name, key=key, commands=commands)
        leaving = threading.Thread(target=_leave, args=(store, frontage, replica), daemon=True)
        _ignore_signals() if frontage is None else frontage.pass_signals_on()
        leaving.start()
        with replica:
            replica.run()
        engine.dismiss()
    finally:
        if frontage is not None:
            frontage.close()


def _engine(options: EngineOptions, groups: Any) -> DynamicInferenceEngine:
    """This rank's engine."""
    device = Device(_place(options.device))
    if not device.is_cuda:
        apply_cpu_settings(options.threads)
    source = open_source(options.model)
    plan, dtype = source.config(), choose_dtype(options.dtype, device)
    experts = groups.ep.size() if groups.ep is not None else 1
    model = build_model(source, dtype=dtype, device=str(device.torch), pg_collection=groups, expert_parallel=experts)
    shape = shape_of(plan, dtype=str(dtype).removeprefix("torch."))
    available = device.available_bytes() // (1 if device.is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    asked = options.config | {"pg_collection": groups}
    config = machine_config(asked, shape, is_cuda=device.is_cuda, available_bytes=available)
    if "buffer_size_gb" not in asked:  # every rank of an engine has the same, whatever was free when it looked
        config = dataclasses.replace(config, buffer_size_gb=_least(config.buffer_size_gb))
    return DynamicInferenceEngine(
        model,
        config,
        tokenizer=_tokenizer_of(source),
        eos_ids=plan.eos_ids,
        device=str(device.torch),
        model_name=source.name,
        owns_weights=True,
    )


def _least(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=home_of(None))
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN)
    return float(found.item())


def _tokenizer_of(source: Any) -> Any:
    try:
        return source.tokenizer()
    except ModelError:
        return None


def _place(asked: str) -> str:
    """This process's device."""
    if asked not in ("auto", "cuda") or not torch.accelerator.is_available():
        return asked
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return f"cuda:{index}"


def _leave(store: Any, frontage: Frontage | None, replica: Replica) -> None:
    """Stop the replica once HTTP has ended; on rank 0 say so to the others."""
    try:
        if frontage is not None:
            frontage.wait()
            store.set(ENDED, "1")
        else:
            while not store.check([ENDED]):
                time.sleep(LOOK_S)
    except RuntimeError:  # the store has gone: so has rank 0
        print("the rendezvous store has gone; leaving", file=sys.stderr)
    replica.stop()


def _ignore_signals() -> None:
    """Launchers signal every rank; when to leave is told by rank 0, once requests have ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Frontage:
    """Rank 0's processes: the coordinator and HTTP."""

    def __init__(self, options: EngineOptions, settings: ServerConfig) -> None:
        self._options, self._settings = options, settings
        self._folder = tempfile.mkdtemp(prefix="megatron-infer-")
        self._coordinator: Supervisor | None = None
        self._http: Supervisor | None = None
        self._asked_to_end = 0

    def open(self) -> dict[str, Any]:
        """Start them -> where replicas find the coordinator: address, key. Raises ModelError, ConfigError."""
        far = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
        key = secrets.token_hex(16) if far else None
        bind = f"tcp://{_own_address()}:0" if far else f"ipc://{self._folder}/coordinator"
        told: dict[str, Any] = {"bind": bind, "max_queue": self._settings.max_queue, "key": key}
        self._coordinator = Supervisor([Role(name="coordinator", role="coordinator", told=told)])
        self._coordinator.start()
        address = told_by(self._coordinator.process("coordinator"), 60.0)["address"]
        card = make_card(self._options.model, self._folder)
        settings = {item.name: getattr(self._settings, item.name) for item in dataclasses.fields(self._settings)}
        told = {"settings": settings, "coordinator": address, "key": key, "card": card, "folder": self._folder}
        told["model"] = self._options.model
        self._http = Supervisor([Role(name="http", role="front", told=told)])
        self._http.start()
        return {"address": address, "key": key}

    def pass_signals_on(self) -> None:
        """What this rank is sent goes to HTTP, which lets requests end; the third time it ends all."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, *_: Any) -> None:
        self._asked_to_end += 1
        if self._http is not None:
            self._http.end_one("http")

    def wait(self) -> None:
        """Until HTTP has ended because it was asked to, or for good."""
        assert self._http is not None
        http = self._http.process("http")
        told = False
        while not (http.given_up or (self._asked_to_end and not http.is_running)):
            if http.ready is not None and not told:
                print(f"serving {self._options.model} at {http.ready['url']}", file=sys.stderr, flush=True)
                told = True
            time.sleep(LOOK_S)

    def close(self) -> None:
        for fleet in (self._http, self._coordinator):
            if fleet is not None:
                fleet.stop(number=signal.SIGTERM, patience_s=STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _own_address() -> str:
    from megatron_infer.comm.groups import reachable_as

    return next(iter(reachable_as()))
