"""LLM and AsyncLLM: an engine with a model and a tokenizer, for scripts."""
