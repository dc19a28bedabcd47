"""A server with a small model for clients that run in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from server_case import serving, tiny_engine, tiny_model

from megatron_infer.rl.weight_receiver import WeightReceiver


@contextlib.contextmanager
def served_tiny(folder: Path) -> Iterator[tuple[str, str]]:
    """(URL of a server with the control routes, path below its weights root of other weights of its model)."""
    (folder / "next").mkdir()
    tensors = {
        name: value.contiguous().clone()
        for name, value in tiny_model(max_sequence_length=2048, seed=7).named_parameters()
    }
    save_file(tensors, folder / "next" / "model.safetensors")
    engine = tiny_engine(max_sequence_length=2048, buffer_size_gb=0.05)
    commands = {"commands_of": lambda one: WeightReceiver(one, weights_root=folder).commands()}
    with serving(engine, control=True, weights_root=str(folder), **commands) as case:
        yield case.url, "next"
