"""A caller's request on its way in and out: checks, tokenization, text, outputs."""
