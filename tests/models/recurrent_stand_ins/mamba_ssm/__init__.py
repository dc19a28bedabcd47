"""A stand-in in plain torch for what megatron-core takes from mamba_ssm."""

__version__ = "2.2.5"
