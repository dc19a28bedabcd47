"""GPU kernels in Triton; nothing here imports triton before a kernel is asked for."""
