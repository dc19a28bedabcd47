"""Models: from files and live objects to what the runner drives. The only package that imports megatron-core."""
