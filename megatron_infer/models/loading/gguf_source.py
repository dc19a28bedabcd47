"""The tensors of a GGUF file, dequantised, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.models.loading.hf_names import Span
from megatron_infer.models.loading.model_description import ModelDescription

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights:
    """A `TensorReader` of an open GGUF file."""

    def __init__(self, file: GGUFFile, description: ModelDescription) -> None:
        self._file = file
        self._is_llama = file.metadata["general.architecture"] == "llama"
        self._head_dim: int = description.transformer["kv_channels"]
        self._source = {hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[source].shape for name, source in self._source.items()}

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor = torch.from_numpy(self._file.read(self._source[name], rows))
        if columns is not None:
            tensor = tensor[:, columns[0] : columns[1]]
        if self._is_llama and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
            # llama.cpp's order in each head, pairs (2i, 2i + 1), to the one that RoPE here wants: (i, H/2 + i).
            return tensor.unflatten(0, (-1, self._head_dim // 2, 2)).transpose(1, 2).reshape(tensor.shape)
        return tensor


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its name, so that it is reported as unexpected."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
