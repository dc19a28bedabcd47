"""What the metadata and the tensors' names of a GGUF file say of its model: a ModelDescription. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.families import FAMILIES
from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.models.loading.model_description import ModelDescription, RopeScaling
from megatron_infer.text.end_ids import gguf_end_ids

_ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}

# Keys under "<architecture>." that this module reads or that do not change the arithmetic.
# fmt: off
_KNOWN = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "vocab_size", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
})
# fmt: on


class GGUFReader:
    """Reads the description off an open GGUF file."""

    def __init__(self, file: GGUFFile, *, name: str) -> None:
        self.file, self.name = file, name
        self.metadata: Mapping[str, Any] = file.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{self.name}: GGUF architecture {architecture!r} is not supported "
                f"(supported: {', '.join(_ARCHITECTURES)})"
            )
        self.architecture: str = architecture

    def describe(self) -> ModelDescription:
        architecture = _ARCHITECTURES[self.architecture]
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
        if FAMILIES[architecture].fields.get("qk_layernorm"):
            transformer["qk_layernorm"] = True
        window = self._get("attention.sliding_window")
        if window:
            transformer["window_size"] = [window - 1, 0]
        return ModelDescription(
            architecture=architecture,
            transformer=transformer,
            vocab_size=vocab,
            max_sequence_length=self._number("context_length"),
            rotary_base=float(self._get("rope.freq_base", 10000.0)),
            rope_scaling=self._rope_scaling(),
            tied_embeddings="output.weight" not in self.file.tensors,
            linear_biases=biases,
            eos_ids=gguf_end_ids(self.metadata),
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
