"""Tensors of the KV cache and of recurrent states, the memory regions under them, and copies to the host and back."""
