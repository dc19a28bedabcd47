"""Tests of what is not installed are left out: the coordinator needs an extra."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["test_coordinator*"] if find_spec("zmq") is None else []
