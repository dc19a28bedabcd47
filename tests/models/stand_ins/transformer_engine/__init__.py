"""A stand-in in plain torch for as much of Transformer Engine 2.8 as megatron-core builds models from."""

from transformer_engine import common, pytorch

__version__ = "2.8.0"
__all__ = ["common", "pytorch"]
