"""The shapes in which other training loops expect an engine: TRL, Megatron-RL, vLLM's colocated LLM."""
