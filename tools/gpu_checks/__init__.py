"""The checks of tools/gpu_check.py: what is promised of a GPU, each as a function that finds out."""
