"""A stand-in for NVIDIA's Apex: its fused layer norm, in plain torch."""
