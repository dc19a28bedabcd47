"""What megatron-core takes of flash-linear-attention, in plain torch: the definitions, token by token."""
