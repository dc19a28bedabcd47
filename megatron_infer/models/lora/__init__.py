"""LoRA adapters: small pairs of matrices beside a model's linears, many of them over one model."""
