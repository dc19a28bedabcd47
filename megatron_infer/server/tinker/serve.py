"""A server of the Tinker API in one process: a thread for HTTP, and one for the live model's engine and trainer."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
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
from megatron_infer.server.tinker.training import ALPHA, LiveEngine, LiveTrainer
from megatron_infer.text.tokenizer import Tokenizer

log = logging.getLogger("megatron_infer.server")

MAX_LORAS = 8
"""Adapters that one step may sample from, unless the options say another number."""


def live_trainer(
    source: ModelSource,
    tokenizer: Tokenizer | None,
    *,
    lora_rank: int,
    training_share: float,
    dtype: Any = "float32",
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
) -> LiveTrainer:
    """The model of a source with an adapter that trains, and an engine that samples from copies of it."""
    model = build_model(source, dtype=dtype, device=device)
    adapter = attach_lora(model, rank=lora_rank, alpha=ALPHA, trains_only=True)
    options = dict(config or {})
    options["lora"] = LoRAConfig.from_dict({"max_loras": MAX_LORAS, **options.get("lora", {}), "max_rank": lora_rank})
    session = RolloutSession(
        model, options, tokenizer, eos_ids=source.config().eos_ids, model_name=source.name, meter=None
    )
    return LiveTrainer(session, adapter, training_share=training_share)


@contextlib.contextmanager
def served_engine(trainer: LiveTrainer, coordinator: str, *, on_failed: Callable[[], None]) -> Iterator[None]:
    """A thread steps the trainer's engine for a coordinator, and runs its operations. on_failed: it has ended early."""
    replica = Replica(LiveEngine(trainer.session.engine, trainer), coordinator, name="live")

    def run() -> None:
        try:
            with trainer.session.generating(restore_rng=False), replica:
                replica.run()
        except BaseException:
            log.exception("the engine's thread has failed")
        finally:
            on_failed()

    trainer.wake = replica.wake
    thread = threading.Thread(target=run, name="megatron-infer-live")
    thread.start()
    try:
        yield
    finally:
        replica.stop()
        thread.join()


def serve(
    trainer: LiveTrainer,
    tokenizer: Tokenizer | None,
    settings: ServerConfig,
    *,
    model_name: str,
    state_dir: Path,
    durable: bool,
    note: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C. durable: see `TinkerService`."""
    service = TinkerService(trainer, model_name=model_name, state_dir=state_dir, durable=durable)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listening,
        ServerFolder() as folder,
        running(Coordinator(folder.coordinator, CoordinatorOptions(max_queue=settings.max_queue))),
    ):
        server = HttpServer(
            settings,
            coordinator=folder.coordinator,
            tokenizer=tokenizer,
            model=model_name,
            modules=(TinkerRoutes(service),),
        )
        with served_engine(trainer, folder.coordinator, on_failed=server.shut_down):
            server.run(listening, on_ready=lambda url: note(f"serving {model_name} at {url}"))
