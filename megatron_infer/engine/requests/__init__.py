"""Callers' requests: checks and tokenization on the way in, text and outputs on the way out."""
