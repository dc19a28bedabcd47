"""One step on one rank: plan in, tokens out."""
