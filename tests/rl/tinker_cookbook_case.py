"""The SDK's calls and two loops of tinker-cookbook, its own code: python tinker_cookbook_case.py URL FOLDER.

The supervised recipe takes its dataset and its tokenizer from here, as both are on a hub.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import typing

os.environ |= {"TINKER_BASE_URL": sys.argv[1], "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
FOLDER = sys.argv[2]
NAME = "Qwen/Qwen3-8B"  # a name whose renderer the cookbook knows; the server has SmolLM2 under it

import chz  # noqa: E402
import datasets  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402
from tinker.types import LossFnType  # noqa: E402
from tinker_cookbook import tokenizer_utils  # noqa: E402
from tinker_cookbook.recipes import sl_loop  # noqa: E402
from tinker_cookbook.rl import train  # noqa: E402
from tinker_cookbook.rl import types as rl  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from megatron_infer import open_source  # noqa: E402

QUESTION = [{"role": "user", "content": "Say the word."}, {"role": "assistant", "content": "Heliotrope is the word."}]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=open_source("smollm2").tokenizer().backend, eos_token="<|im_end|>")
tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
datasets.load_dataset = lambda *_, **__: datasets.DatasetDict(
    train=datasets.Dataset.from_list([{"messages": QUESTION}] * 24)
)


def refusal(call):
    """The error of a call; "": it has none."""
    try:
        call()
    except tinker.TinkerError as error:
        return str(error)
    return ""


def sampled(client, prompt):
    return client.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


def sdk():
    """Sample, train, sample what was trained, save, and go on from what was saved."""
    service = tinker.ServiceClient()
    prompt = types.ModelInput.from_ints(tokenizer.encode("The capital of France is"))
    base = service.create_sampling_client(base_model=NAME)
    drawn = base.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=1), include_prompt_logprobs=True).result()
    assert len(drawn.sequences) == 2 and drawn.prompt_logprobs[0] is None
    assert base.compute_logprobs(prompt).result()[1:] == drawn.prompt_logprobs[1:]
    client = service.create_lora_training_client(base_model=NAME, rank=8).result()
    tokens = [*prompt.to_ints(), *tokenizer.encode(" Lyon.")]
    inputs = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * (prompt.length - 1) + [1.0] * (len(tokens) - prompt.length),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(6):
        batch = client.forward_backward([datum], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3))
        losses.append(batch.result().metrics["loss:sum"])

    def custom(data, logprobs):
        loss = -logprobs[0][-1]
        return loss, {"mine": float(loss)}

    custom_metrics = client.forward_backward_custom([datum], custom).result().metrics
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampler = client.save_weights_and_get_sampling_client()
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1, temperature=0.0)).result().sequences[0].tokens
    path = client.save_state("six").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    named = client.save_weights_for_sampler("mine").result().path
    stranger = tinker.ServiceClient(api_key="tml-other")
    hidden = [
        refusal(lambda: stranger.create_training_client_from_state(path).result()),
        refusal(lambda: sampled(stranger.create_sampling_client(model_path=named), prompt)),
    ]
    sampled(service.create_sampling_client(model_path=named), prompt)
    losses_refused = {
        name: refusal(lambda name=name: client.forward([datum], name).result()) for name in typing.get_args(LossFnType)
    }
    loss = resumed.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    own = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    return {
        "losses": losses,
        "custom": custom_metrics,
        "answer": tokenizer.decode(answer),
        "resumed": [loss, own],
        "hidden": hidden,
        "losses_refused": losses_refused,
    }


def supervised():
    """sl_loop.py as it is."""
    path = f"{FOLDER}/sl"
    sl_loop.main(
        sl_loop.Config(model_name=NAME, batch_size=4, lora_rank=8, learning_rate=2e-3, log_path=path, save_every=0)
    )
    with open(f"{path}/metrics.jsonl") as file:
        return [json.loads(line)["train_mean_nll"] for line in file]


class Env(rl.Env):
    """The reward is the share of answers' tokens that are 'the'."""

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(tokenizer.encode("Words:")), [tokenizer.eos_token_id]

    async def step(self, action, *, extra=None):
        share = sum(" the" in tokenizer.decode([id]) for id in action) / max(1, len(action))
        end = {"next_observation": tinker.ModelInput.empty(), "next_stop_condition": []}
        return rl.StepResult(reward=share + 0.01 * (id(self) % 7), episode_done=True, **end)


class Group(rl.EnvGroupBuilder):
    async def make_envs(self):
        return [Env() for _ in range(4)]


class Data(rl.RLDataset):
    def get_batch(self, index):
        return [Group(), Group()]

    def __len__(self):
        return 2


@chz.chz
class Builder(rl.RLDatasetBuilder):
    async def __call__(self):
        return Data(), None


def reinforced():
    """rl/train.py as it is."""
    path = f"{FOLDER}/rl"
    options = {"max_tokens": 8, "eval_every": 0, "save_every": 0, "recipe_name": "test", "lora_rank": 8}
    config = train.Config(
        learning_rate=1e-4, dataset_builder=Builder(), model_name=NAME, log_path=path, base_url=sys.argv[1], **options
    )
    asyncio.run(train.main(config))
    with open(f"{path}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    found = {"sdk": sdk(), "supervised": supervised(), "reinforced": reinforced()}
    with open(f"{FOLDER}/found.json", "w") as file:
        json.dump(found, file)
    os._exit(0)
