"""Watching the engine: typed metrics (core) and the sinks that show them."""
