"""NeMo-RL's synchronizer and rollouts on two tensor-parallel Ray actors, whose live model generates: nemo_rl_case.py
MODEL_DIR (for its tokenizer). Prints "every rank done"."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import ray
import torch
import transformers
from nemo_rl_surface import GENERATION, MCORE
from ports import free_port

OLD = "5.11.0"
transformers.__version__ = OLD  # NeMo-RL refuses 5.12, and reads nothing that has changed
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.models.generation.interfaces import GenerationInterface  # noqa: E402
from nemo_rl.weight_sync.megatron_weight_synchronizer import MegatronWeightSynchronizer  # noqa: E402

from megatron_infer.rl.frameworks.nemo_rl import EngineGeneration  # noqa: E402

RANKS = 2
PROMPTS = [[40, 41, 42], [50, 51], [60, 61, 62, 63, 64]]


class PolicyWorker:
    """Stands for NeMo-RL's MegatronPolicyWorker: a live model, in an actor with an event loop."""

    def __init__(self, rank: int, port: int, folder: str) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        from megatron.core import parallel_state

        from megatron_infer.testing.tiny import tiny_gpt

        parallel_state.initialize_model_parallel(RANKS)
        sizes = {"vocab_size": 260, "max_sequence_length": 256, "init_method_std": 0.2}
        self.model = tiny_gpt(**sizes, randomize=False, tensor_model_parallel_size=RANKS).train()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.addresses = [one.data_ptr() for one in self.model.parameters()]

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        return model

    async def train(self) -> bool:
        """-> whether the model is the trainer's, with its weights where they were."""
        assert [one.data_ptr() for one in self.model.parameters()] == self.addresses
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.05)
        return self.model.training

    async def logits(self, ids: list[int]) -> torch.Tensor:
        """This rank's part of the vocabulary, by megatron-core's forward."""
        self.model.eval()
        with torch.inference_mode():
            found = self.model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0].float()
        self.model.train()
        return found.clone()


def check(workers: list[Any], prompt: list[int], row: dict[str, Any]) -> None:
    end = int(row["unpadded_sequence_lengths"][0])
    ids = row["output_ids"][0, :end].tolist()
    logits = torch.cat(ray.get([one.logits.remote(ids) for one in workers]), -1)[:, :260]
    picked = torch.tensor(ids[len(prompt) :])[:, None]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(-1, picked)[:, 0]
    assert ids[: len(prompt)] == prompt and row["generation_lengths"].tolist() == [8]
    torch.testing.assert_close(row["logprobs"][0, len(prompt) : end], expected, atol=2e-5, rtol=0)


@ray.remote(num_cpus=0)
def drawn_elsewhere(generation: Any, data: Any) -> list[Any]:
    """As NeMo-RL's collectors draw: with a copy, in a process of their own."""

    async def rows() -> list[Any]:
        return sorted([pair async for pair in generation.generate_async(data, greedy=False)], key=lambda pair: pair[0])

    return [row for _, row in asyncio.run(rows())]


def main(folder: str) -> None:
    port = free_port()
    actor = ray.remote(PolicyWorker).options(num_cpus=0)
    workers = [actor.remote(rank, port, folder) for rank in range(RANKS)]
    policy = types.SimpleNamespace(
        worker_group=types.SimpleNamespace(workers=workers), offload_before_refit=lambda: None
    )
    generation = GENERATION | {"max_new_tokens": 8, "mcore_generation_config": MCORE}
    config = {"generation": generation, "megatron_cfg": {"tensor_model_parallel_size": RANKS}}
    generation = EngineGeneration(config, None, policy=policy, weights_path=None, skip_weight_load=False)
    assert isinstance(generation, GenerationInterface) and generation._leaders == [0]
    synchronizer = MegatronWeightSynchronizer(policy, generation, colocated=True)
    synchronizer.init_communicator()
    assert pickle.dumps(generation.cfg)
    width = max(map(len, PROMPTS))
    data = BatchedDataDict(
        input_ids=torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS]),
        input_lengths=torch.tensor([len(prompt) for prompt in PROMPTS]),
        stop_strings=[None] * len(PROMPTS),
    )
    for _ in range(3):
        synchronizer.sync_weights()
        rows = ray.get(drawn_elsewhere.remote(generation, data))
        whole = generation.generate(data, greedy=True)
        assert generation.finish_generation(release_gpu=True)
        for prompt, row in zip(PROMPTS, rows, strict=True):
            check(workers, prompt, row)
        for number, prompt in enumerate(PROMPTS):
            end = len(prompt) + 8
            ids = whole["output_ids"][number, :end].tolist()
            logits = torch.cat(ray.get([one.logits.remote(ids) for one in workers]), -1)[:, :260]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]
        assert ray.get([one.train.remote() for one in workers]) == [True] * RANKS
    print("every rank done")


if __name__ == "__main__":
    of_workers = Path(sys.argv[1], "workers")
    of_workers.mkdir()
    (of_workers / "sitecustomize.py").write_text(f"import transformers\ntransformers.__version__ = {OLD!r}\n")
    path = os.pathsep.join([str(of_workers), os.environ["PYTHONPATH"]])
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    main(sys.argv[1])
