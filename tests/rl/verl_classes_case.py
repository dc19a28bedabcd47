"""The rollout by verl's installed classes in one process, actors on threads in the place of Ray's: MODEL_DIR.

verl's plugin loading, registries, Hydra config, RolloutReplica, BaseRollout, HFModelConfig, LLMServerClient and
CheckpointEngine are its own. Prints what the test of both cases in test_framework_verl.py compares.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import ray
import torch
import transformers
from hydra import compose, initialize_config_module
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import get_rollout_replica_class
from verl_surface import StandInRay

from megatron_infer.rl.frameworks.verl import weights  # noqa: F401  # custom_backend_module
from megatron_infer.rl.frameworks.verl.server import RolloutServer

stand_in, remote = StandInRay(), ray.remote
ray.get_actor, ray.get = stand_in.get_actor, stand_in.get
ray.remote = lambda *args, **how: stand_in.remote(*args) if args == (RolloutServer,) else remote(*args, **how)

NAME, ROLLOUT = "megatron_infer", "actor_rollout_ref.rollout"
PROMPT = [40, 41, 42, 43, 44]


class Client(FullyAsyncLLMServerClient):
    """verl's, to one server without a balancer."""

    server: Any = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "only", self.server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None: ...


async def main(folder: str) -> None:
    changes = {
        "actor_rollout_ref.model.path": folder,
        f"{ROLLOUT}.name": NAME,
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.prompt_length": 32,
        f"{ROLLOUT}.response_length": 200,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.max_num_seqs": 4,  # so that some of the 64 requests meet the second update
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in changes.items()])
    theirs = config.actor_rollout_ref
    replica = get_rollout_replica_class(NAME)(0, theirs.rollout, theirs.model, gpus_per_node=1)
    await replica.launch_servers()
    replica.servers = [replica._server_handle]
    model_config = omega_conf_to_dataclass(theirs.model)
    rollout = get_rollout_class(NAME)(omega_conf_to_dataclass(theirs.rollout), model_config, None, replica_rank=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    await replica.sleep()  # as verl does before the first weights

    async def update(step: int) -> None:
        """verl's order for servers, with its checkpoint engines in the place of worker groups."""
        await replica.abort_all_requests()
        await replica.release_kv_cache()
        kind = CheckpointEngineRegistry.get(NAME)
        send, receive = kind(1 << 16, is_master=True), kind(1 << 16)
        ours, others = kind.build_topology(1, 1, [send.prepare(), receive.prepare()])
        ends = ((send, ours), (receive, others))
        await asyncio.gather(
            *(
                asyncio.to_thread(end.init_process_group, **{name: values[0] for name, values in how.items()})
                for end, how in ends
            )
        )
        pairs = ((name, tensor * (1 + 0.1 * step)) for name, tensor in model.state_dict().items())
        sending = asyncio.to_thread(asyncio.run, send.send_weights(pairs, step))
        receiving = rollout.update_weights(
            receive.receive_weights(step), wire_format=kind.wire_format, global_steps=step
        )
        metrics, _ = await asyncio.gather(sending, receiving)
        for end, _ in ends:
            end.finalize()
        await replica.resume_kv_cache()
        await replica.resume_generation()
        found["metrics"] = metrics

    found: dict[str, Any] = {}
    client = Client(config=config)
    client.server = replica.servers[0]
    await update(1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    first = await client.generate("first", prompt_ids=PROMPT, sampling_params=sampling | {"max_tokens": 8})
    calls = [client.generate(f"long {i}", prompt_ids=PROMPT, sampling_params=sampling) for i in range(64)]
    running = asyncio.gather(*calls)
    await asyncio.sleep(0.5)
    await update(2)
    found |= {"first": first.model_dump(), "long": [one.model_dump() for one in await running]}
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
