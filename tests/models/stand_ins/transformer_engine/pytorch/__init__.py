from transformer_engine.pytorch import distributed, float8_tensor, fp8
from transformer_engine.pytorch.module import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "distributed",
           "float8_tensor", "fp8"]  # fmt: skip
