"""Weights of the live model: change detection, copies derived from them, weights offloaded to the host."""
