from transformer_engine.pytorch.quantisers import Float8Tensor

__all__ = ["Float8Tensor"]
