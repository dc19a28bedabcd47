"""Kinds of device and pinned memory, each in its module; `context.modes` chooses among them."""
