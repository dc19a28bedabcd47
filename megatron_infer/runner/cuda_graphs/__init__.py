"""Captured steps: padded shapes, CUDA graphs of them, and draws that a graph can hold."""
