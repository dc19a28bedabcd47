"""Kernels of other packages behind the same seam: flash-attn and FlashInfer."""
