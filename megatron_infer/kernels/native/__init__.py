"""Kernels in C++ for a CPU: sources, how they are compiled, and how each is called."""
