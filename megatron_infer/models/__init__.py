"""Live megatron-core models adopted in place: layers that serve from the cache and train as before."""
