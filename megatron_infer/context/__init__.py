"""Who owns which memory: blocks, rows and the prefix cache. Pure Python here; the tensors live in `context.store`."""
