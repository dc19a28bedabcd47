"""The Tinker API over a live model: clients train adapters and sample from them, with one set of base weights."""
