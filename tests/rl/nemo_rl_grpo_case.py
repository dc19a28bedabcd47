"""NeMo-RL's `setup` and `grpo_train` with the one changed import line: nemo_rl_grpo_case.py MODEL_DIR CHECKOUT

Its config files, data loader, rollouts, advantages, loss, refits, metrics and logger are its own, over Ray. A tiny live
model in one actor stands for `Policy`, by setup's own `policy_factory`. Prints "STEPS" and JSON: for each step what
NeMo-RL logs of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import nemo_rl_on_cpu  # noqa: F401
import ray
import torch
import transformers
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl.utils.logger import Logger
from omegaconf import OmegaConf
from ports import free_port

STEPS = 3
RATE = 0.05
LINES = (
    "from nemo_rl.models.generation.megatron import MegatronGeneration",
    "from megatron_infer.rl.frameworks.nemo_rl import EngineGeneration as MegatronGeneration",
)
CHANGES = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": STEPS, "val_period": 0},
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "policy": {
        "max_total_sequence_length": 64,
        "train_global_batch_size": 8,
        "generation": {
            "max_new_tokens": 12,
            "mcore_generation_config": {"buffer_size_gb": 0.02, "block_size_tokens": 16, "cuda_graph_impl": "none"},
        },
    },
    "data": {"shuffle": False, "num_workers": 0},
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
}


class PolicyWorker:
    """A live model and its trainer, in an actor with an event loop."""

    def __init__(self, port: int, name: str) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        from megatron.core import parallel_state

        from megatron_infer.testing.tiny import tiny_gpt

        parallel_state.initialize_model_parallel()
        sizes = {"vocab_size": 260, "max_sequence_length": 256, "init_method_std": 0.2}
        self.model = tiny_gpt(**sizes, randomize=False).train()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.addresses = [one.data_ptr() for one in self.model.parameters()]

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        return model

    async def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Of each token but the first."""
        with torch.no_grad():
            return self._logprobs(ids)

    async def step(self, data: Any, loss_fn: Any) -> tuple[float, float, dict[str, float]]:
        """-> loss, norm of its gradients, NeMo-RL's metrics."""
        assert [one.data_ptr() for one in self.model.parameters()] == self.addresses and self.model.training
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss, metrics = loss_fn(self._logprobs(data["input_ids"]), data, data["sample_mask"].sum(), mask.sum())
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= RATE * gradient
        norm = torch.nn.utils.get_total_norm(gradients)
        counts = {"global_valid_seqs": 8, "global_valid_toks": int(mask.sum()), "lr": RATE}
        return float(loss.detach()), float(norm), metrics | counts

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        from megatron_infer.models.exact_forward import exact_math

        assert self.model.training, "the engine sleeps, the model is the trainer's"
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        with exact_math(self.model) as exact:
            return exact.token_logprobs(self.model(ids, positions, None)[:, :-1], ids[:, 1:])


class LivePolicy:
    """What setup and grpo_train call of NeMo-RL's Policy."""

    def __init__(self, *, tokenizer: Any, **_: Any) -> None:
        worker = ray.remote(PolicyWorker).options(num_cpus=0).remote(free_port(), tokenizer.name_or_path)
        self.worker_group = types.SimpleNamespace(workers=[worker])

    def get_logprobs(self, data: Any, **_: Any) -> Any:
        found = ray.get(self.worker_group.workers[0].logprobs.remote(data["input_ids"]))
        return BatchedDataDict(logprobs=torch.nn.functional.pad(found, (1, 0)))

    def train(self, data: Any, loss_fn: Any, **_: Any) -> dict[str, Any]:
        loss, norm, metrics = ray.get(self.worker_group.workers[0].step.remote(data, loss_fn))
        many = {name: [value] for name, value in metrics.items()}
        return {"loss": torch.tensor([loss]), "grad_norm": torch.tensor([norm]), "all_mb_metrics": many}

    def prepare_for_training(self) -> None: ...

    def prepare_for_lp_inference(self) -> None: ...

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def print_node_ip_and_gpu_id(self) -> None: ...

    def shutdown(self) -> None: ...


@ray.remote(num_cpus=0)
class Letters:
    """The reward is the number of different letters."""

    def step(self, messages: list[Any], facts: list[Any]) -> Any:
        texts = [one[-1]["content"] for one in messages]
        rewards = torch.tensor([float(len(set(text))) for text in texts])
        said = [{"role": "environment", "content": ""} for _ in texts]
        nothing = [None] * len(texts)
        return EnvironmentReturn(said, facts, nothing, rewards, torch.ones(len(texts)), nothing)


class Recorder(Logger):
    """NeMo-RL's logger, whose metrics are kept too."""

    steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int, *args: Any, **how: Any) -> None:
        found = self.steps.setdefault(step, {})
        found |= {name: float(value) for name, value in metrics.items() if isinstance(value, float | int)}
        super().log_metrics(metrics, step, *args, **how)


def changed_grpo(checkout: Path) -> Any:
    """The module nemo_rl.algorithms.grpo, with the line changed."""
    path = checkout / "nemo_rl" / "algorithms" / "grpo.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(LINES[0]) == 1
    spec = importlib.util.spec_from_file_location("nemo_rl.algorithms.grpo", path)
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(text.replace(*LINES), path, "exec"), vars(module))
    return module


def main(folder: str, checkout: Path) -> None:
    grpo = changed_grpo(checkout)
    register_omegaconf_resolvers()
    config = load_config(str(checkout / "examples" / "configs" / "grpo_math_1B_megatron.yaml"))
    sizes = {"policy": {"model_name": folder, "generation": {"backend": "megatron"}}, "logger": {"log_dir": "logs"}}
    config = OmegaConf.merge(config, CHANGES, sizes)
    given = OmegaConf.to_container(config, resolve=True)
    given["logger"] |= {name: False for name in given["logger"] if name.endswith("_enabled") or name == "monitor_gpus"}
    tokenizer = get_tokenizer(given["policy"]["tokenizer"])
    given["policy"]["generation"] = configure_generation_config(given["policy"]["generation"], tokenizer)
    prompts = [tokenizer(f"word {number}", return_tensors="pt")["input_ids"][0] for number in range(2 * STEPS)]
    data = [
        {
            "message_log": [{"role": "user", "content": f"word {number}", "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {},
            "loss_multiplier": 1.0,
            "idx": number,
            "task_name": "letters",
        }
        for number, ids in enumerate(prompts)
    ]
    grpo.Logger = Recorder
    engine = grpo.MegatronGeneration
    grpo.MegatronGeneration = lambda **how: engine(**how, options={"batch_invariant": True})
    policy, generation, _, _, loader, _, loss_fn, logger, checkpointer, state, config, *_ = grpo.setup(
        grpo.MasterConfig(**given), tokenizer, data, None, policy_factory=LivePolicy
    )
    environments = {"letters": Letters.remote()}
    grpo.grpo_train(
        policy, generation, loader, None, tokenizer, loss_fn, environments, None, logger, checkpointer, state, config
    )
    print("STEPS " + json.dumps([Recorder.steps[step] for step in sorted(Recorder.steps) if step]))


if __name__ == "__main__":
    of_workers = Path(sys.argv[1], "workers")
    of_workers.mkdir(exist_ok=True)
    (of_workers / "sitecustomize.py").write_text("import nemo_rl_on_cpu\n")
    path = os.pathsep.join([str(of_workers), os.environ["PYTHONPATH"]])
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    main(sys.argv[1], Path(sys.argv[2]))
