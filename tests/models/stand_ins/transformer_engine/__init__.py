"""A stand-in in plain torch for as much of Transformer Engine 2.4 as megatron-core builds models from."""

from transformer_engine import common, pytorch

__version__ = "2.4.0"
__all__ = ["common", "pytorch"]
