"""A model of one's own, without Megatron: an engine serves it with continuous batching and a paged cache.

    config = PipelineConfig(
        model_path=folder, custom_architectures=["examples/pipeline_model"], quantization_encoding="float32"
    )
    pipeline = OverlapTextGenerationPipeline(config, ToyModel, 0, {}, TextTokenizer(folder))

`folder` has config.json, tokenizer.json and perhaps *.safetensors; without these the weights are random.
"""

from collections.abc import Sequence
from typing import Any

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

    def __init__(self, tokens: Tensor, input_row_offsets: Tensor, cache: Any) -> None:
        self.tokens, self.input_row_offsets, self.kv_cache_inputs = tokens, input_row_offsets, cache


class ToyModel(PipelineModel[Any], KVCacheMixin):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config, width = self.huggingface_config, self.huggingface_config.hidden_size
        self.net = nn.ModuleDict({"words": nn.Embedding(config.vocab_size, width)})
        self.net["places"] = nn.Embedding(config.max_seq_len, width)
        for layer in range(config.num_layers):
            self.net[f"qkv{layer}"] = nn.Linear(width, 3 * width)
            self.net[f"mlp{layer}"] = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.net.to(self.devices[0], self.dtype).load_state_dict(self.weights, strict=bool(self.weights))

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: Any, huggingface_config: Any) -> int:
        return upper_bounded_default(huggingface_config.max_seq_len, pipeline_config.max_length)

    @classmethod
    def get_kv_params(cls, config: Any, n_devices: int, cache_config: Any, dtype: torch.dtype) -> KVCacheParams:
        size, heads = config.hidden_size // config.num_heads, config.num_heads
        return KVCacheParams(dtype=dtype, num_layers=config.num_layers, n_kv_heads=heads, head_dim=size)

    @classmethod
    def get_num_layers(cls, huggingface_config: Any) -> int:
        return int(huggingface_config.num_layers)

    def prepare_initial_token_inputs(self, contexts: Sequence[Any], cache: Any = None, n_logits: int = 1) -> ToyInputs:
        tokens = torch.cat([context.next_tokens for context in contexts])
        lengths = [0, *(context.active_length for context in contexts)]
        return ToyInputs(tokens, torch.tensor(lengths, device=tokens.device).cumsum(0), cache)

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ToyInputs:
        offsets = torch.arange(len(next_tokens) + 1, device=next_tokens.device)
        return ToyInputs(next_tokens, offsets, prev_model_inputs.kv_cache_inputs)

    def execute(self, model_inputs: Any) -> ModelOutputs:
        cache, heads = model_inputs.kv_cache_inputs, self.huggingface_config.num_heads
        hidden = self.net["words"](model_inputs.tokens) + self.net["places"](cache.positions)
        for layer in range(self.huggingface_config.num_layers):
            q, k, v = (one.unflatten(-1, (heads, -1)) for one in self.net[f"qkv{layer}"](hidden).chunk(3, -1))
            hidden = hidden + cache.attend(layer, q, k, v)
            hidden = hidden + self.net[f"mlp{layer}"](hidden)
        last = hidden[model_inputs.input_row_offsets[1:] - 1]
        return ModelOutputs(logits=last @ self.net["words"].weight.T)


ARCHITECTURES = [Architecture(name="ToyForCausalLM", pipeline_model=ToyModel)]
