"""verl's classes of a rollout: where weights arrive, and what starts a server; the options that both read."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray
import torch.distributed as dist
from verl.utils.device import get_device_id
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.distributed.generation_groups import generation_groups
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.errors import ConfigError, WeightUpdateError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.models.trainer_state import wrapper_chain
from megatron_infer.rl.frameworks.engine_host import EngineHost
from megatron_infer.rl.frameworks.verl.server import RolloutServer
from megatron_infer.rl.frameworks.verl.server_calls import ServerCalls
from megatron_infer.rl.session import RolloutSession
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates import apply

log = logging.getLogger("megatron_infer.verl")

NAME = "megatron_infer"
OPTIONS = {
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "max_tokens",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "seed": "seed",
}
"""Field of verl's RolloutConfig -> option of InferenceConfig."""
ONLY = {
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "quantization": None,
    "cudagraph_capture_sizes": None,
    "scheduling_policy": "fcfs",
    "prometheus.enable": False,
    "mtp.enable_rollout": False,
}
"""Fields of RolloutConfig of which one value has a counterpart here."""


def engine_options(config: Any) -> dict[str, Any]:
    """Options of InferenceConfig from verl's RolloutConfig. Raises ConfigError for what has no counterpart."""
    for field, only in ONLY.items():
        value = config
        for part in field.split("."):
            value = getattr(value, part)
        if value != only:
            raise ConfigError(f"rollout.{field} is {value!r}, {NAME} has {only!r} only")
    mapped = {ours: getattr(config, theirs) for theirs, ours in OPTIONS.items()}
    length = config.max_model_len or config.prompt_length + config.response_length
    mode = (config.logprobs_mode or "processed").removesuffix("_logprobs")
    given = dict((config.engine_kwargs or {}).get(NAME) or {})
    return mapped | {"max_sequence_length": length, "logprobs_mode": mode} | given


class EngineRollout(BaseRollout):
    """verl's side of weights: in the trainer's process (hybrid), or in a CheckpointEngineWorker (standalone)."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._options = engine_options(self.config)
        rank, self._num_ranks = int(os.environ.get("RANK", "0")), replica_size(self.config)
        self.replica_rank = rank // self._num_ranks if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % self._num_ranks == 0
        self.report: UpdateReport | None = None
        """Report of the latest weight update."""
        self._host: EngineHost | None = None

    async def resume(self, tags: list[str]) -> None:
        if self._host is not None and "kv_cache" in tags:
            await asyncio.wrap_future(self._host.generating())

    async def release(self) -> None:
        if self._host is not None:
            await asyncio.wrap_future(self._host.training())

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", *, global_steps: int | None = None, **how: Any
    ) -> None:
        """Write them, or take those of a live model. An update that fails leaves the weights before it in place.

        weights: pairs of Hugging Face name and tensor, or `live.LiveWeights`. The first update makes the engine. Every
        rank of a replica makes the call, with the same tensors.
        """
        if wire_format != "named_tensors":
            raise WeightUpdateError(f"wire_format {wire_format!r}: {NAME} takes named_tensors; choose another backend")
        if how.get("peft_config") is not None:
            raise WeightUpdateError(f"{NAME} takes whole weights: set actor_rollout_ref.model.lora.merge=True")
        if self._host is None:
            self._host = await asyncio.to_thread(self._start, weights if hasattr(weights, "module") else None)
        session = self._host.session
        work = self._host.update(lambda: self._update(session, weights, global_steps))
        self.report = await asyncio.wrap_future(work)
        log.info("replica %d: %s", self.replica_rank, self.report)
        if not self.config.free_cache_engine:
            await self.resume(["kv_cache"])

    def _start(self, live: Any) -> EngineHost:
        """live: `live.LiveWeights`, if the trainer's model is to generate. Raises ConfigError before anything of it is
        changed."""
        model_config = self.model_config
        dicts = [
            None if one is None else one.to_dict() for one in (model_config.hf_config, model_config.generation_config)
        ]
        plan = description_from_config(*dicts)
        tokenizer_end = getattr(model_config.tokenizer, "eos_token_id", None)
        ends = {*plan.eos_ids, *([] if tokenizer_end is None else [tokenizer_end])}
        if live is not None:
            num_ranks = ParallelGroups.of(None, wrapper_chain(live.module)[-1]).engine_size
            if num_ranks != self._num_ranks:
                raise ConfigError(
                    f"the trainer's model has {num_ranks} ranks, a replica of the rollout has {self._num_ranks}; set "
                    "rollout.tensor_model_parallel_size and pipeline_model_parallel_size to the trainer's"
                )
        model = self._built(plan) if live is None else live.module
        mode = KVCacheManagementMode.RECOMPUTE if self.config.free_cache_engine else KVCacheManagementMode.PERSIST
        session = RolloutSession(model, self._options, suspend_mode=mode, eos_ids=sorted(ends), meter=None)
        if live is not None and session.engine.config.batch_invariant:
            live.score_exactly()
        host = EngineHost(session)
        if host.is_leader:
            ServerCalls(host, self.config, ray.get_actor(server_name(self.replica_rank)))
        return host

    def _built(self, plan: Any) -> Any:
        """A model without weights, in the rollout's layout."""
        config, device = self.config, get_device_id()
        groups = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            groups = generation_groups(
                None,
                tensor_parallel=config.tensor_model_parallel_size,
                pipeline_parallel=config.pipeline_model_parallel_size,
                backend=None if str(device).startswith("cpu") else "cpu:gloo,cuda:nccl",
            )
        return build_model(plan, dtype=config.dtype, device=device, pg_collection=groups)

    def _update(self, session: RolloutSession, weights: Any, version: int | None) -> UpdateReport:
        """On the thread that steps the engine, or follows its leader. version None: as before; verl gives none where
        the trainer has made no step."""
        version = session.weight_version if version is None else version
        if hasattr(weights, "module"):
            return session.update_weights(version=version)
        pairs = _pairs(weights)
        try:
            return apply(session.engine, pairs, undo=True, version=version)
        finally:
            for _ in pairs:  # every rank of the trainer drains its generator, or the others wait in a collective
                pass


class EngineReplica(RolloutReplica):
    """One engine: the server actor, and the worker that verl gives it."""

    async def launch_servers(self) -> None:
        engine_options(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(f"{NAME} serves the policy, whose weights come from the trainer, not a fixed model")
        name = server_name(self.replica_rank)
        actor = ray.remote(RolloutServer).options(name=name, max_concurrency=self.max_concurrency, num_cpus=0)
        self._server_handle = actor.remote()
        self.servers = [self._server_handle]
        self._server_address = name


def replica_size(config: Any) -> int:
    """Ranks of a replica."""
    return int(config.tensor_model_parallel_size * config.pipeline_model_parallel_size)


def server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


def _pairs(weights: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of a generator, or of an asynchronous one outside of its event loop."""
    if not hasattr(weights, "__aiter__"):
        yield from weights
        return
    loop, pairs = asyncio.new_event_loop(), aiter(weights)
    try:
        while (pair := loop.run_until_complete(anext(pairs, None))) is not None:
            yield pair
    finally:
        loop.close()
