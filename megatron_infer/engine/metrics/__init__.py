"""Metrics: their definitions, what collects them, and the sinks Prometheus and wandb."""
