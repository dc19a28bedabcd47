"""The engine inside a training loop: sessions, rollouts, weight updates."""
