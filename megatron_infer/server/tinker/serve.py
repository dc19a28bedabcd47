"""A server of the Tinker API in one process: a thread for HTTP, and one for the live model's engine and trainer."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions, running
from megatron_infer.coordinator.replica import Replica
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import ModelSource
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.rl.session import RolloutSession
from megatron_infer.server.http_server import HttpServer, listen
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.socket_base import ServerFolder
from megatron_infer.server.tinker.routes import TinkerRoutes
from megatron_infer.server.tinker.service import TinkerService
from megatron_infer.server.tinker.training import ALPHA, LiveEngine, LiveModel, LiveTrainer
from megatron_infer.text.tokenizer import Tokenizer

log = logging.getLogger("megatron_infer.server")

MAX_LORAS = 8
"""Adapters that one step may sample from, unless the options say another number."""


def live_model(
    source: ModelSource,
    tokenizer: Tokenizer | None,
    *,
    lora_rank: int | None,
    dtype: Any = "float32",
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
    groups: Any = None,
    **how: Any,
) -> LiveModel:
    """The model of a source, whose engine samples from copies of the adapter that trains on it. lora_rank None: all
    weights train. groups: process groups of a job; None: of this process alone. how: of `build_model`."""
    model = build_model(source, dtype=dtype, device=device, pg_collection=groups, **how)
    options, adapter = dict(config or {}), None
    if lora_rank is not None:
        adapter = attach_lora(model, rank=lora_rank, alpha=ALPHA, trains_only=True)
        given = {"max_loras": MAX_LORAS, **options.get("lora", {}), "max_rank": lora_rank}
        options["lora"] = LoRAConfig.from_dict(given)
    if groups is not None:
        options["pg_collection"] = groups
    session = RolloutSession(
        model, options, tokenizer, eos_ids=source.config().eos_ids, model_name=source.name, meter=None
    )
    return LiveModel(session, adapter)


def run_engine(trainer: LiveTrainer, replica: Replica) -> None:
    """Step the trainer's engine for a coordinator, and run its operations, until the replica is stopped."""
    trainer.wake = replica.wake
    with trainer.session.generating(restore_rng=False):
        with replica:
            replica.run()
        trainer.end()


@contextlib.contextmanager
def served_engine(trainer: LiveTrainer, coordinator: str, *, on_failed: Callable[[], None]) -> Iterator[None]:
    """A thread for `run_engine`. on_failed: it has ended early. Its error is raised at the end."""
    replica = Replica(LiveEngine(trainer.session.engine, trainer), coordinator, name="live")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            run_engine(trainer, replica)
        except BaseException as error:
            log.exception("the engine's thread has failed")
            failures.append(error)
        finally:
            trainer.close()
            on_failed()

    thread = threading.Thread(target=run, name="megatron-infer-live")
    thread.start()
    try:
        yield
    finally:
        replica.stop()
        thread.join()
        for failure in failures:
            raise failure


def serve(
    trainer: LiveTrainer,
    tokenizer: Tokenizer | None,
    settings: ServerConfig,
    *,
    model_name: str,
    state_dir: Path,
    durable: bool,
    keys: Mapping[str, str],
    note: Callable[[str], None],
    on_coordinator: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. durable: see `TinkerService`. keys: of tenants, each with a directory of its own.
    on_coordinator: called with the address at which engines may join."""
    folders = {tenant: state_dir / f"tenant-{tenant}" for tenant in keys} or {"": state_dir}
    with (
        contextlib.ExitStack() as stack,
        contextlib.closing(listen(settings.host, settings.port)) as listening,
        ServerFolder() as folder,
        running(Coordinator(folder.coordinator, CoordinatorOptions(max_queue=settings.max_queue))),
    ):
        made = partial(TinkerService, trainer, model_name=model_name, durable=durable, num_tenants=len(folders))
        services = {
            tenant: stack.enter_context(contextlib.closing(made(state_dir=path))) for tenant, path in folders.items()
        }
        server = HttpServer(
            settings,
            coordinator=folder.coordinator,
            tokenizer=tokenizer,
            model=model_name,
            modules=(TinkerRoutes(services, keys),),
        )
        on_coordinator(folder.coordinator)
        with served_engine(trainer, folder.coordinator, on_failed=server.shut_down):
            for service in services.values():
                trainer.submit(service.load).result()
            server.run(listening, on_ready=lambda url: note(f"serving {model_name} at {url}"))
