"""The engine inside a training loop: sessions, rollouts, weights."""
