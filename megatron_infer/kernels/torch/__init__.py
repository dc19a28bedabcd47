"""Kernels in plain torch: the definition of each operation, and a fast form that runs on any device."""
