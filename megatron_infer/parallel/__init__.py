"""Steps over several ranks: the runner of a pipeline stage, sampler and captured draw of a split vocabulary."""
