"""One step on one rank: step plan in, tokens out."""
