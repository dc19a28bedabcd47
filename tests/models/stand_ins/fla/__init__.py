"""A stand-in in plain torch for what megatron-core takes from flash-linear-attention."""
