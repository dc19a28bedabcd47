"""Kinds of device and pinned memory, each in its module; `memory.regions.choose` chooses among them."""
