"""Which family of models the names of Hugging Face tensors belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.model_loader.checkpoint import description_from_model
from megatron_infer.model_loader.hf_weights import base_prefix
from megatron_infer.model_loader.model_description import ModelDescription

_MEGATRON = ("embedding.", "decoder.", "output_layer.")
_ARCHITECTURES = (
    ("block_sparse_moe.", "GraniteMoeHybridForCausalLM"),
    ("shared_mlp.", "GraniteMoeHybridForCausalLM"),
    (".mamba.", "BambaForCausalLM"),
    ("backbone.", "NemotronHForCausalLM"),
    (".mixer.", "NemotronHForCausalLM"),
    ("model.embeddings.", "NemotronHForCausalLM"),
    ("qkv_proj.", "Phi3ForCausalLM"),
    ("gate_up_proj.", "Phi3ForCausalLM"),
    ("transformer.", "GPT2LMHeadModel"),
)
"""Part of a tensor name -> the family that uses it; all other families use Llama's names."""


def is_hf_name(name: str) -> bool:
    """Whether a name is a Hugging Face one rather than megatron-core's."""
    return not name.startswith(_MEGATRON)


def plan_of(model: Any, names: Mapping[str, object] | tuple[str, ...]) -> ModelDescription:
    """The model's description, with the family that the names imply. Raises ModelError for a family that needs plan=:
    the multipliers that it folds into its weights cannot be read from a model."""
    plan = description_from_model(model)
    family = next((family for mark, family in _ARCHITECTURES if any(mark in name for name in names)), None)
    if family == "GraniteMoeHybridForCausalLM":
        raise ModelError(
            f"{family}: its weights are multiplied by values of config.json that the model does not have; give "
            "plan=open_source(directory).config()"
        )
    return plan if family is None else replace(plan, architecture=family)


def spelled(name: str, plan: ModelDescription) -> str:
    """The name as in the family's files: models in memory call the body `model`, files may use another prefix."""
    base = base_prefix(plan)
    return f"{base}.{name.removeprefix('model.')}" if name.startswith("model.") and base != "model" else name
