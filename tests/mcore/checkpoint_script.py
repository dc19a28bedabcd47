"""A script of Megatron-LM: a random model of the arguments, saved where --save says, and its greedy tokens by this
package's own call."""

import json
import os

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.inference.utils import add_inference_args, get_model_builder
from megatron.training import get_args, initialize_megatron
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams

parse_and_validate_args(
    extra_args_provider=add_inference_args, args_defaults={"no_load_rng": True, "no_load_optim": True}
)
initialize_megatron()
groups = ProcessGroupCollection.use_mpu_process_groups()
model = get_model_builder(get_args()).build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
save_checkpoint(1, model, None, None, 0)
config = InferenceConfig(buffer_size_gb=0.05, max_sequence_length=64, block_size_tokens=16)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
outputs = DynamicInferenceEngine(model[0].eval(), config).generate(json.loads(os.environ["PROMPTS"]), params)
if torch.distributed.get_rank() == 0:
    print("tokens:", json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
