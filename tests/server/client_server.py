"""A server with a small model for clients that run in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from server_case import serving, tokenizer

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.testing.tiny import tiny_gpt


@contextlib.contextmanager
def served_tiny(folder: Path) -> Iterator[tuple[str, str]]:
    """(URL of a server with the control routes, path below its weights root of other weights of its model)."""
    shape = {"vocab_size": 320, "max_sequence_length": 2048, "init_method_std": 0.2}
    (folder / "next").mkdir()
    tensors = {name: value.contiguous().clone() for name, value in tiny_gpt(**shape, seed=7).named_parameters()}
    save_file(tensors, folder / "next" / "model.safetensors")
    config = InferenceConfig(buffer_size_gb=0.05, block_size_tokens=16, max_sequence_length=2048, max_requests=16)
    engine = DynamicInferenceEngine(tiny_gpt(**shape), config, tokenizer=tokenizer())
    commands = {"commands_of": lambda one: WeightReceiver(one, weights_root=folder).commands()}
    with serving(engine, control=True, weights_root=str(folder), **commands) as case:
        yield case.url, "next"
