"""Kernel backends behind the seam of `base.py`: tensors in, tensors out, no requests."""
