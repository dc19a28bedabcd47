"""verl's server manager and checkpoint manager with this engine as a standalone server: verl_servers_case.py MODEL_DIR.

Prints what the test of both cases in test_framework_verl.py compares.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

import ray
import torch
import transformers
from hydra import compose, initialize_config_module
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

NAME, ROLLOUT = "megatron_infer", "actor_rollout_ref.rollout"
WEIGHTS = "megatron_infer.rl.frameworks.verl.weights"
PROMPT = [40, 41, 42, 43, 44]


class Trainer(Worker):
    """Stands for verl's actor worker: the weights of a directory, scaled by the step."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        importlib.import_module(WEIGHTS)  # as verl's worker does with custom_backend_module
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._engine = CheckpointEngineRegistry.new(NAME, bucket_size=1 << 16, is_master=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        scale = 1 + 0.1 * global_steps
        pairs = ((name, tensor * scale) for name, tensor in self._model.state_dict().items())
        return await self._engine.send_weights(pairs, global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **how: Any) -> Any:
        return getattr(self._engine, method)(*args, **how)


async def main(folder: str) -> None:
    changes = {
        "actor_rollout_ref.model.path": folder,
        f"{ROLLOUT}.name": NAME,
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": 1,
        f"{ROLLOUT}.prompt_length": 32,
        f"{ROLLOUT}.response_length": 200,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.max_num_seqs": 4,  # so that some of the 64 requests meet the second update
        f"{ROLLOUT}.checkpoint_engine.backend": NAME,
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module": WEIGHTS,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in changes.items()])
    servers = await LLMServerManager.create(config)
    group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(ray.remote(Trainer), folder))
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    manager = CheckpointEngineManager(settings, group, servers.get_replicas())
    client = servers.get_client(FullyAsyncLLMServerClient)
    metrics = await manager.update_weights(global_steps=1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    first = await client.generate("first", prompt_ids=PROMPT, sampling_params=sampling | {"max_tokens": 8})
    calls = [client.generate(f"long {i}", prompt_ids=PROMPT, sampling_params=sampling) for i in range(64)]
    running = asyncio.gather(*calls)
    await asyncio.sleep(0.5)
    await manager.update_weights(global_steps=2)
    long = [output.model_dump() for output in await running]
    outputs = {"first": first.model_dump(), "long": long, "metrics": metrics}
    print("FOUND " + json.dumps(outputs))


if __name__ == "__main__":
    ray.init(num_cpus=16, num_gpus=2, include_dashboard=False)
    asyncio.run(main(sys.argv[1]))
