"""A stand-in in plain torch for as much of Transformer Engine 1.12 as megatron-core builds models from."""

from transformer_engine import common, pytorch

__version__ = "1.12.0"
__all__ = ["common", "pytorch"]
