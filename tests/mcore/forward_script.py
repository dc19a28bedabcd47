"""A script of Megatron-LM: how far each answer's tokens are from the greedy ones of megatron-core's own forward of the
model that --load names, without a cache and in the dtype of the arguments. ANSWERS: pairs of a prompt and its answer.

Prints the distances in steps between numbers of the dtype."""

import json
import os

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.inference.utils import add_inference_args, get_model_builder
from megatron.training import get_args, initialize_megatron
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint

parse_and_validate_args(
    extra_args_provider=add_inference_args, args_defaults={"no_load_rng": True, "no_load_optim": True}
)
initialize_megatron()
groups = ProcessGroupCollection.use_mpu_process_groups()
model = get_model_builder(get_args()).build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
load_checkpoint(model, None, None)
dtype = next(model[0].parameters()).dtype
steps = []
for prompt, answer in json.loads(os.environ["ANSWERS"]):
    ids = prompt + answer
    with torch.no_grad():
        logits = model[0].eval()(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, len(prompt) - 1 : -1]
    highest, chosen = logits.float().amax(-1), logits.float().gather(-1, torch.tensor(answer)[:, None])[:, 0]
    spacing = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(highest.abs())))
    steps.append(((highest - chosen) / spacing).tolist())
print("dtype:", dtype, flush=True)
print("steps:", json.dumps(steps), flush=True)
