"""Which family of models the names of Hugging Face tensors belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.checkpoint import description_from_model
from megatron_infer.models.loading.families import FAMILIES, family_of
from megatron_infer.models.loading.model_description import ModelDescription

_MEGATRON = ("embedding.", "decoder.", "output_layer.")


def is_hf_name(name: str) -> bool:
    """Whether a name is a Hugging Face one rather than megatron-core's."""
    return not name.startswith(_MEGATRON)


def plan_of(model: Any, names: Mapping[str, object] | tuple[str, ...]) -> ModelDescription:
    """The model's description, with the family that the names imply. Raises ModelError for a family that needs plan=:
    the multipliers that it folds into its weights cannot be read from a model."""
    plan = description_from_model(model)
    architecture = _implied(names)
    if architecture is None:
        return plan
    if any(field.startswith("scales.") for field in FAMILIES[architecture].fields):
        raise ModelError(
            f"{architecture}: its weights are multiplied by values of config.json that the model does not have; give "
            "plan=open_source(directory).config()"
        )
    return replace(plan, architecture=architecture)


def _implied(names: Iterable[str]) -> str | None:
    """The architecture whose `Family.marks` occur in the names. None: the names may be Llama's."""
    text = "\n".join(names)
    return next((name for name, family in FAMILIES.items() if any(mark in text for mark in family.marks)), None)


def spelled(name: str, plan: ModelDescription) -> str:
    """The name as in the family's files: models in memory call the body `model`, files may use another prefix."""
    base = family_of(plan).base
    return f"{base}.{name.removeprefix('model.')}" if name.startswith("model.") and base != "model" else name
