from transformer_engine.pytorch.quantisers import QuantizedTensor

__all__ = ["QuantizedTensor"]
