"""The functions of Transformer Engine 2 for products in FP8, and of megatron-core for when to use it.

Names and signatures of versions 2.4 to 2.20. Nothing is imported before a model in FP8 is adopted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import megatron_infer.models.mcore_compat  # noqa: F401  megatron-core's import without its notices


def _fp8_utils() -> Any:
    return importlib.import_module("megatron.core.fp8_utils")


def is_there() -> bool:
    """True where megatron-core has found Transformer Engine."""
    return bool(_fp8_utils().HAVE_TE)


def recipe_of(config: Any) -> Any:
    """megatron-core's recipe for a config; raises ValueError if the installed version of either lacks it."""
    return _fp8_utils().get_fp8_recipe(config)


def is_fp8_layer(config: Any, layer: int) -> bool:
    """layer: its number in the whole model, from 0; the first and last layers may stay in bfloat16."""
    return not _fp8_utils().is_first_last_bf16_layer(config, layer)


def row_multiple(config: Any) -> int:
    """The number of rows of a product is a multiple of this."""
    return int(_fp8_utils().get_fp8_align_size(config.fp8_recipe))


def quantization() -> Any:
    """The module with the states of recipes and the global state."""
    try:
        return importlib.import_module("transformer_engine.pytorch.quantization")
    except ModuleNotFoundError:  # older versions
        return importlib.import_module("transformer_engine.pytorch.fp8")


def general_gemm() -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    return found


def workspace() -> Any:
    """cuBLAS's workspace, for versions that take it from the caller."""
    return importlib.import_module("transformer_engine.pytorch.module.base").get_workspace()
