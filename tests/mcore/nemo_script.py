"""NeMo-RL's MegatronGenerationMixin on a tiny model: prepare, generate, sleep, wake."""

import types

import torch
import transformers
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

transformers.__version__ = "5.11.0"  # NeMo-RL refuses 5.12, and reads nothing that has changed
torch.distributed.init_process_group(backend="gloo")
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.models.generation.megatron.megatron_worker import MegatronGenerationMixin  # noqa: E402

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams  # noqa: E402
from megatron_infer.testing import tiny  # noqa: E402

GENERATION = {
    "buffer_size_gb": 0.05,
    "num_cuda_graphs": 0,
    "block_size_tokens": 16,
    "enable_chunked_prefill": True,
    "use_cuda_graphs_for_non_decode_steps": False,
    "max_tokens": 1024,
    "kv_cache_management_mode": "recompute",
    "materialize_only_last_token_logits": True,
    "num_speculative_tokens": 0,
    "max_model_len": 64,
    "enable_prefix_caching": False,
    "cuda_graph_impl": "none",
    "expose_http_server": False,
    "parsers": [],
}


class Host(MegatronGenerationMixin):
    rank, is_generation_colocated, should_disable_forward_pre_hook = 0, True, False
    tokenizer = types.SimpleNamespace(pad_token_id=0)
    megatron_tokenizer = types.SimpleNamespace(eod=-1, tokenize=lambda text: [], detokenize=lambda ids: "")

    def move_model(self, model, *args, **keywords):
        return model


parallel_state.initialize_model_parallel()
host = Host()
host.model = tiny.tiny_gpt().eval()
if not hasattr(host.model, "pg_collection"):
    host.model.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
host._init_inference_engine_state()
sampling = {"top_k": None, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 5, "stop_strings": None}
host.cfg = {"generation": {"mcore_generation_config": GENERATION, **sampling}}
host.prepare_for_generation()
data = BatchedDataDict(input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]), input_lengths=torch.tensor([3, 2]))
greedy = host.generate(data=data, greedy=True)["output_ids"].tolist()
drawn = host.generate(data=data, greedy=False)
assert drawn["generation_lengths"].tolist() == [5, 5] and (drawn["logprobs"][0, 3:] < 0).all()
host.finish_generation()
host.prepare_for_generation()
assert host.generate(data=data, greedy=True)["output_ids"].tolist() == greedy
host.finish_generation()
own = DynamicInferenceEngine(host.model, InferenceConfig(buffer_size_gb=0.05, max_sequence_length=64))
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
outputs = own.generate([[5, 6, 7], [8, 9]], params)
assert [row[n : n + 5] for row, n in zip(greedy, (3, 2), strict=True)] == [one.outputs[0].token_ids for one in outputs]
print("as the engine itself:", greedy)
