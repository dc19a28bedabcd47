"""Bridges to other training loops: TRL, Megatron-RL, and loops written for vLLM's colocated LLM."""
