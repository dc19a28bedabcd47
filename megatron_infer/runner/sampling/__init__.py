"""From logits to tokens: parameters by row, seeded draws, filters, penalties, log probabilities."""
