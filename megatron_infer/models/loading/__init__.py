"""Models and weights from Hugging Face directories, GGUF files and torch_dist checkpoints."""
