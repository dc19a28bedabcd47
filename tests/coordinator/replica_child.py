"""A replica process: `replica_child.py ADDRESS echo|tiny NAME [role=...] [setting=value ...]`."""

from __future__ import annotations

import sys

from megatron_infer.coordinator.replica import Replica


def echo(**settings):
    from echo import EchoEngine

    return EchoEngine(**{key: float(value) if "." in value else int(value) for key, value in settings.items()})


def tiny():
    import torch

    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.engine.engine import DynamicInferenceEngine
    from megatron_infer.testing.tiny import tiny_gpt

    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    config = InferenceConfig(
        buffer_size_gb=0.02,
        block_size_tokens=16,
        max_sequence_length=256,
        max_requests=8,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
        prefix_caching_coordinator_policy="longest_prefix",
        check_invariants=True,
    )
    return DynamicInferenceEngine(model, config)


def main() -> None:
    address, kind, name, *settings = sys.argv[1:]
    given = dict(setting.split("=") for setting in settings)
    role = given.pop("role", "prefill_and_decode")
    Replica({"echo": echo, "tiny": tiny}[kind](**given), address, name=name, role=role).run()


if __name__ == "__main__":
    main()
