"""LLM, AsyncLLM and DynamicInferenceEngine: the step loop, suspend and resume, and how an engine is built."""
