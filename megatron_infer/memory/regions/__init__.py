"""Kinds of device and pinned memory, one module each; `memory.regions.choose` picks one."""
