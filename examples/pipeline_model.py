"""A model of one's own, without Megatron: 60 lines that an engine serves with continuous batching and a paged cache.

    config = PipelineConfig(model_path=folder, custom_architectures=["examples/pipeline_model"], quantization_encoding="float32")
    pipeline = OverlapTextGenerationPipeline(config, ToyModel, eos_token_id=0, weight_adapters={}, tokenizer=TextTokenizer(folder))

`folder` has config.json, tokenizer.json and perhaps *.safetensors; weights that are not there are random.
"""

import torch
from torch import Tensor, nn

from megatron_infer.pipelines import Architecture
from megatron_infer.pipelines.interfaces import (
    KVCacheMixin,
    KVCacheParams,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    upper_bounded_default,
)


class ToyInputs(ModelInputs):
    tokens: Tensor
    input_row_offsets: Tensor

    def __init__(self, tokens, input_row_offsets, kv_cache_inputs):
        self.tokens, self.input_row_offsets = tokens, input_row_offsets
        self.kv_cache_inputs = kv_cache_inputs


class ToyModel(PipelineModel, KVCacheMixin):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config, width = self.huggingface_config, self.huggingface_config.hidden_size
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"words": nn.Embedding(config.vocab_size, width)})
        self.net["places"] = nn.Embedding(config.max_seq_len, width)
        for layer in range(config.num_layers):
            self.net[f"qkv{layer}"] = nn.Linear(width, 3 * width)
            self.net[f"mlp{layer}"] = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.net.to(self.devices[0], self.dtype).load_state_dict(self.weights, strict=bool(self.weights))

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config, huggingface_config):
        return upper_bounded_default(huggingface_config.max_seq_len, pipeline_config.max_length)

    @classmethod
    def get_kv_params(cls, config, n_devices, kv_cache_config, cache_dtype):
        layers, heads = cls.get_num_layers(config), config.num_heads
        return KVCacheParams(
            dtype=cache_dtype, num_layers=layers, n_kv_heads=heads, head_dim=config.hidden_size // heads
        )

    @classmethod
    def get_num_layers(cls, config):
        return config.num_layers

    def prepare_initial_token_inputs(self, context_batch, kv_cache_inputs=None, return_n_logits=1):
        tokens = torch.cat([context.next_tokens for context in context_batch])
        lengths = [0, *(context.active_length for context in context_batch)]
        return ToyInputs(tokens, torch.tensor(lengths, device=tokens.device).cumsum(0), kv_cache_inputs)

    def prepare_next_token_inputs(self, next_tokens, prev_model_inputs):
        offsets = torch.arange(len(next_tokens) + 1, device=next_tokens.device)
        return ToyInputs(next_tokens, offsets, prev_model_inputs.kv_cache_inputs)

    def execute(self, model_inputs):
        cache, heads = model_inputs.kv_cache_inputs, self.huggingface_config.num_heads
        hidden = self.net["words"](model_inputs.tokens) + self.net["places"](cache.positions)
        for layer in range(self.huggingface_config.num_layers):
            q, k, v = (one.unflatten(-1, (heads, -1)) for one in self.net[f"qkv{layer}"](hidden).chunk(3, -1))
            hidden = hidden + cache.attend(layer, q, k, v)
            hidden = hidden + self.net[f"mlp{layer}"](hidden)
        last = hidden[model_inputs.input_row_offsets[1:] - 1]
        logits = last @ self.net["words"].weight.T
        return ModelOutputs(logits=logits, next_token_logits=logits)


ARCHITECTURES = [Architecture(name="ToyForCausalLM", pipeline_model=ToyModel)]
