"""Tiny models of transformers with adapters of PEFT whose every factor is random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from hybrid_models import random_hybrid

LLAMA = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "mha": ("LlamaConfig", LLAMA | {"num_key_value_heads": 6}),
    "qwen3": ("Qwen3Config", LLAMA | {"head_dim": 16}),
    "phi3": ("Phi3Config", LLAMA | {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", GPT2),
}
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(kind: str) -> Any:
    """A kind of KINDS or of `hybrid_models.CASES`, in fp32."""
    if kind not in KINDS:
        return random_hybrid(kind)
    name, options = KINDS[kind]
    config = getattr(transformers, name)(**options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def with_adapter(model: Any, targets: Any, *, seed: int = 1, **options: Any) -> Any:
    """The model under PEFT, with random factors; `save_pretrained` writes the adapter."""
    import peft

    options = {"r": 4, "lora_alpha": 8} | options
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options)).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return wrapped


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def merge(model: torch.nn.Module, adapter: Any) -> torch.nn.Module:
    """Add an adapter to a megatron-core model's weights."""
    with torch.no_grad():
        for path, pair in adapter.pairs.items():
            weight = model.get_submodule(path).weight
            weight += (pair.scale * pair.b.double() @ pair.a.double()).to(weight.dtype)
    return model


def saved(tmp_path: Path, kind: str, targets: Any, **options: Any) -> tuple[Path, Path, Any]:
    """(the base model's directory, the adapter's directory, the model under PEFT)."""
    model = base_model(kind)
    model.save_pretrained(tmp_path / "base")
    wrapped = with_adapter(model, targets, **options)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", wrapped
