"""For tests, ours and a user's: tiny random models, and megatron-core's training stack on a CPU."""
