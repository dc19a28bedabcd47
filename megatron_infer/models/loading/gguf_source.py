"""GGUF files as a model source: a ModelDescription, and dequantised tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.models.loading.gguf_description import GGUFReader
from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.models.loading.hf_names import Span

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
    """Description and tensors of an open GGUF file (a `TensorReader`)."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.file = GGUFFile(path)
        self.name = name or str(path)
        self.metadata: Mapping[str, Any] = self.file.metadata
        reader = GGUFReader(self.file, name=self.name)
        self.architecture = reader.architecture
        self._source = {hf_name(name): name for name in self.file.tensors if name != "rope_freqs.weight"}
        self.description = reader.describe()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self.file.tensors[source].shape for name, source in self._source.items()}

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor = torch.from_numpy(self.file.read(self._source[name], rows))
        if columns is not None:
            tensor = tensor[:, columns[0] : columns[1]]
        permuted = self.architecture == "llama" and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name)
        return self._unpermute(tensor) if permuted else tensor

    def _unpermute(self, tensor: Tensor) -> Tensor:
        """Undo llama.cpp's reordering of each q / k head: pairs (2i, 2i + 1) -> (i, H/2 + i), as RoPE here wants."""
        head_dim = self.description.transformer["kv_channels"]
        heads = tensor.shape[0] // head_dim
        pairs = tensor.reshape(heads, head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its name, so that it is reported as unexpected."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
