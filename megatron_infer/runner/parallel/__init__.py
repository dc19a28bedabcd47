"""Steps over several ranks: the runner of a pipeline stage, the sampler of a split vocabulary."""
