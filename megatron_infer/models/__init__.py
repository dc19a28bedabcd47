"""Live megatron-core models adopted in place: their layers generate from the paged cache and train as before."""
