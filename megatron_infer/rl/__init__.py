"""The engine inside a training loop."""
