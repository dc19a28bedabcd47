"""One engine over several processes: which groups it spans, how its ranks stay in step, who is still there."""
