"""GGUF files as a model source: a ModelDescription, and dequantised tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.model_loader.gguf_file import GGUFFile
from megatron_infer.model_loader.hf_names import Span
from megatron_infer.model_loader.model_description import ModelDescription, RopeScaling
from megatron_infer.text.gguf_vocab import end_ids

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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
# Keys under "<architecture>." that this module reads or that do not change the arithmetic.
# fmt: off
_KNOWN = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "vocab_size", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
})
# fmt: on


class GGUFWeights:
    """Description and tensors of an open GGUF file (a `TensorReader`)."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.file = GGUFFile(path)
        self.name = name or str(path)
        self.metadata: Mapping[str, Any] = self.file.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{self.name}: GGUF architecture {architecture!r} is not supported "
                f"(supported: {', '.join(_ARCHITECTURES)})"
            )
        self.architecture: str = architecture
        self._source = {hf_name(name): name for name in self.file.tensors if name != "rope_freqs.weight"}
        self.description = self._describe()

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

    def _describe(self) -> ModelDescription:
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._get("attention.key_length") or self._get("rope.dimension_count") or hidden // heads
        self._refuse_unknown(head_dim)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        vocab = (
            self.file.tensors["token_embd.weight"].shape[0]
            if "token_embd.weight" in self.file.tensors
            else len(tokens or ())
        )
        biases = self._biases()
        transformer = {
            "num_layers": self._number("block_count"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self._get("attention.head_count_kv") or heads,
            "kv_channels": int(head_dim),
            "ffn_hidden_size": self._number("feed_forward_length"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": self._epsilon(),
            "gated_linear_unit": True,
            "activation": "silu",
            "add_bias_linear": bool(set(biases) - {"qkv"}),
            "add_qkv_bias": "qkv" in biases,
        }
        if self.architecture == "qwen3":
            transformer["qk_layernorm"] = True
        window = self._get("attention.sliding_window")
        if window:
            transformer["window_size"] = [window - 1, 0]
        return ModelDescription(
            architecture=_ARCHITECTURES[self.architecture],
            transformer=transformer,
            vocab_size=vocab,
            max_sequence_length=self._number("context_length"),
            rotary_base=float(self._get("rope.freq_base", 10000.0)),
            rope_scaling=self._rope_scaling(),
            tied_embeddings="output.weight" not in self.file.tensors,
            linear_biases=biases,
            eos_ids=end_ids(self.metadata),
            bos_id=self.metadata.get("tokenizer.ggml.bos_token_id"),
            pad_id=self.metadata.get("tokenizer.ggml.padding_token_id"),
            dtype="float32",
            name=self.name,
        )

    def _get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _number(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(
                f"{self.name}: GGUF metadata {self.architecture}.{key} must be a positive number, got {value!r}"
            )
        return value

    def _epsilon(self) -> float:
        # Stored as float32: 1e-05 is read as 9.999999747e-06. The model was trained with the short decimal.
        value = self._get("attention.layer_norm_rms_epsilon", 1e-6)
        return float(np.format_float_positional(np.float32(value), unique=True))

    def _biases(self) -> tuple[str, ...]:
        names = {"qkv": "attn_q", "proj": "attn_output", "fc1": "ffn_gate", "fc2": "ffn_down"}
        return tuple(kind for kind, name in names.items() if f"blk.0.{name}.bias" in self.file.tensors)

    def _refuse_unknown(self, head_dim: int) -> None:
        prefix = f"{self.architecture}."
        unknown = [key for key in self.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN]
        unknown = [key for key in unknown if self.metadata[key] not in (0, 0.0, None, False)]
        if unknown:
            listing = ", ".join(f"{key}={self.metadata[key]!r}" for key in unknown)
            raise ModelError(f"{self.name}: GGUF metadata that may change the arithmetic is not supported: {listing}")
        for key in ("rope.dimension_count", "attention.value_length"):
            value = self._get(key, head_dim)
            if value != head_dim:
                raise ModelError(f"{self.name}: {prefix}{key} is {value}, supported is the head dimension {head_dim}")

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self._get("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ModelError(f"{self.name}: rope scaling {kind!r} is not supported (supported: none, linear)")
        if "rope_freqs.weight" in self.file.tensors:  # Llama 3.1 and later: a divisor for each frequency
            return RopeScaling(kind="factors", factors=tuple(self.file.read("rope_freqs.weight").tolist()))
        factor = float(self._get("rope.scaling.factor") or self._get("rope.scale_linear") or 1.0)
        return RopeScaling(kind="linear", factor=factor) if kind == "linear" and factor != 1.0 else None


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its name, so that it is reported as unexpected."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
