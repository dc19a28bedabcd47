"""`serve` under torchrun: every group of tp x pp x ep ranks is one engine; rank 0 also starts coordinator and HTTP.

rank 0                    coordinator and HTTP subprocesses, and its rank of replica 0
first rank of an engine   Replica.run(): connects the engine to the coordinator
other ranks               engine.follow()

When HTTP has ended (SIGTERM lets running requests finish first), rank 0 sets a key in the rendezvous store and all
ranks leave.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.coordinator.replica import Replica
from megatron_infer.distributed.backends import device_of
from megatron_infer.distributed.groups import build_groups
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.metrics.wandb import LOGGER as METRICS_LOGGER
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.audio.speech_model import check_vocabulary
from megatron_infer.server.engine_replica import engine_replica
from megatron_infer.server.launch import STOP_TIMEOUT_S, TOKENIZER_TIMEOUT_S, http_options
from megatron_infer.server.process_options import EngineOptions, allowed_by
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.socket_base import ServerFolder
from megatron_infer.server.speech import speech_processes, with_voices
from megatron_infer.server.supervisor import Supervisor, coordinator_process
from megatron_infer.utils.child_process import end_with_parent
from megatron_infer.utils.stderr_log import log_to_stderr

ADDRESS_KEY, ENDED_KEY = "megatron_infer/serve", "megatron_infer/serve/ended"
"""Keys in the rendezvous store: the coordinator's address, and that HTTP has ended."""
POLL_S = 0.2


def serve_rank(options: EngineOptions, settings: ServerConfig, *, tp: int, pp: int, ep: int) -> None:
    """Serve on this rank until SIGTERM, one of the engines of `options`. An error is raised on every rank."""
    groups, rank = groups_of_job(options.dp, tp=tp, pp=pp, ep=ep), int(os.environ["RANK"])
    options = dataclasses.replace(options, config=_of_first_rank(options.config))
    store = torch.distributed.distributed_c10d._get_default_store()
    frontend = FrontendProcesses(options, settings) if rank == 0 else None
    try:
        if frontend is not None:
            store.set(ADDRESS_KEY, json.dumps(frontend.start()))
        store.wait([ADDRESS_KEY], timedelta(seconds=TOKENIZER_TIMEOUT_S))
        coordinator = json.loads(store.get(ADDRESS_KEY))
        engine = _build_engine(options, groups)
        check_vocabulary(options.model, engine.shape.vocab_size)
        rank_group = engine.rank_group.groups
        if not rank_group.is_leader:
            ignore_signals()
            engine.follow(WeightReceiver(engine, weights_root=settings.weights_root).followed())
            return
        if options.config.get("logging_step_interval"):
            log_to_stderr(METRICS_LOGGER)
        part = rank_group.dp_rank * options.dp // rank_group.dp_size  # ranks of one engine have its role
        replica = engine_replica(
            engine,
            coordinator["address"],
            name=f"replica{rank_group.dp_rank}",
            role=options.roles[part],
            key=None if coordinator["key"] is None else coordinator["key"].encode(),
            **allowed_by(settings),
        )
        stopping = threading.Thread(target=_stop_with_http, args=(store, frontend, replica), daemon=True)
        ignore_signals() if frontend is None else frontend.forward_signals()
        stopping.start()
        with replica:
            replica.run()
        engine.dismiss()
        if frontend is not None and frontend.failure is not None:
            raise ModelError(frontend.failure)
    finally:
        if frontend is not None:
            frontend.close()


def groups_of_job(dp: int, *, tp: int, pp: int, ep: int) -> Any:
    """The process groups of all ranks. Raises ConfigError where the launcher has started another number of them."""
    world = int(os.environ["WORLD_SIZE"])
    if dp * tp * pp * ep != world:
        raise ConfigError(
            f"{world} processes, but dp x tp x pp x ep = {dp} x {tp} x {pp} x {ep} = {dp * tp * pp * ep}; "
            f"start as many (torchrun --nproc-per-node {dp * tp * pp * ep})"
        )
    if torch.distributed.is_torchelastic_launched():  # another launcher may end before its ranks, as a shell does
        end_with_parent()
    return build_groups(tensor_parallel=tp, pipeline_parallel=pp, expert_parallel=ep)


def _build_engine(options: EngineOptions, groups: Any) -> DynamicInferenceEngine:
    """This rank's part of its engine."""
    device = Device(device_of_rank(options.device))
    if not device.is_cuda:
        apply_cpu_settings(options.threads)
    source = open_source(options.model)
    linear = options.config.get("linear_backend", "auto")
    plan, dtype = source.config(), choose_dtype(options.dtype, device, linear_backend=linear)
    experts = groups.ep.size() if groups.ep is not None else 1
    model = build_model(
        source,
        dtype=dtype,
        device=str(device.torch),
        pg_collection=groups,
        expert_parallel=experts,
        use_legacy_module=options.use_legacy_module,
        max_sequence_length=options.config.get("max_sequence_length", InferenceConfig.max_sequence_length),
    )
    shape = shape_of(plan, dtype=str(dtype).removeprefix("torch."))
    available = device.available_bytes() // (1 if device.is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    given = options.config | {"pg_collection": groups}
    config = machine_config(
        given,
        shape,
        is_cuda=device.is_cuda,
        available_bytes=available,
        tensor_parallel_size=1 if groups.tp is None else groups.tp.size(),
    )
    # free memory differs between ranks, but the ranks of an engine need one size
    config = dataclasses.replace(config, buffer_size_gb=_min_over_ranks(config.buffer_size_gb))
    return DynamicInferenceEngine(
        model,
        config,
        tokenizer=_tokenizer_of(source),
        eos_ids=plan.eos_ids,
        device=str(device.torch),
        model_name=source.name,
        owns_weights=True,
    )


def _of_first_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's options: what each rank derives from its own free memory may differ."""
    shared = [config]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def _min_over_ranks(value: float) -> float:
    least = torch.tensor([value], dtype=torch.float64, device=device_of(None))
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return float(least.item())


def _tokenizer_of(source: Any) -> Any:
    try:
        return source.tokenizer()
    except ModelError:
        return None


def device_of_rank(name: str) -> str:
    """The device of this rank of a torchrun job, where `name` leaves it open."""
    if name not in ("auto", "cuda") or not torch.accelerator.is_available():
        return name
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return f"cuda:{index}"


def _stop_with_http(store: Any, frontend: FrontendProcesses | None, replica: Replica) -> None:
    """Stop the replica once HTTP has ended; rank 0 also sets ENDED_KEY for the other ranks."""
    try:
        if frontend is not None:
            frontend.wait()
            store.set(ENDED_KEY, "1")
        else:
            while not store.check([ENDED_KEY]):
                time.sleep(POLL_S)
    except RuntimeError:  # the store has gone, and rank 0 with it
        print("the rendezvous store has gone; leaving", file=sys.stderr)
    replica.stop()


def ignore_signals() -> None:
    """Launchers signal every rank; a rank leaves when rank 0 sets ENDED_KEY, after running requests have finished."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class FrontendProcesses:
    """Rank 0's subprocesses: the coordinator and HTTP."""

    def __init__(self, options: EngineOptions, settings: ServerConfig) -> None:
        self._options = options
        self._settings = with_voices(options.model, settings)
        self._is_multi_node = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
        self._folder = ServerFolder(None if self._is_multi_node else options.endpoint_base)
        self._coordinator: Supervisor | None = None
        self._http: Supervisor | None = None
        self._num_signals = 0

    def start(self) -> dict[str, Any]:
        """Start both -> where replicas reach the coordinator: address, key. Raises ModelError, ConfigError."""
        key = secrets.token_hex(16) if self._is_multi_node else None
        bind = f"tcp://{_own_address()}:0" if self._is_multi_node else self._folder.coordinator
        options = {"bind": bind, "max_queue": self._settings.max_queue, "key": key}
        self._coordinator = Supervisor([coordinator_process(options)])
        self._coordinator.start()
        address = self._coordinator.process("coordinator").wait_ready(60.0)["address"]
        options["bind"] = address  # the next process listens at the port that its peers know
        http = http_options(
            self._options,
            self._settings,
            self._folder.path,
            coordinator=address,
            key=None if key is None else key.encode(),
        )
        self._http = Supervisor(
            [*speech_processes(self._options.model, self._folder.path, self._settings), http.process()]
        )
        self._http.start()
        return {"address": address, "key": key}

    def forward_signals(self) -> None:
        """Forward SIGTERM and SIGINT to HTTP: the first drains it, the second ends it at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate_http)

    def _terminate_http(self, *_: Any) -> None:
        self._num_signals += 1
        if self._http is not None:
            self._http.terminate_workers()

    @property
    def failure(self) -> str | None:
        """Why the server ends by itself: a process was given up."""
        both = (self._http, self._coordinator)
        return next((why for one in both if one is not None and (why := one.failure()) is not None), None)

    def wait(self) -> None:
        """Until HTTP has ended after a signal, or a process was given up."""
        assert self._http is not None
        http = self._http.process("http")
        is_announced = False
        while self.failure is None and not (self._num_signals and not http.is_running):
            if http.ready is not None and not is_announced:
                print(f"serving {self._options.model} at {http.ready['url']}", file=sys.stderr, flush=True)
                is_announced = True
            time.sleep(POLL_S)

    def close(self) -> None:
        for supervisor in (self._http, self._coordinator):
            if supervisor is not None:
                supervisor.stop(number=signal.SIGTERM, timeout_s=STOP_TIMEOUT_S)
        self._folder.close()


def _own_address() -> str:
    from megatron_infer.distributed.groups import own_addresses

    return next(iter(own_addresses()))
