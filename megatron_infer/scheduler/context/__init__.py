"""Which sequence holds which rows, blocks and state slots, and the prefix cache. Ids only: tensors are in `memory`."""
