"""What the package uses of NeMo-RL: recorded from a checkout, and stand-ins made of the record where there is none.

PYTHONPATH=NEMO_RL PYTHON_WITH_RAY tests/rl/nemo_rl_surface.py > tests/rl/nemo_rl_surface.json
"""

from __future__ import annotations

import collections
import importlib
import inspect
import json
import types
from pathlib import Path
from typing import Any

from verl_surface import StandInRay, class_of, method_of

RECORD = Path(__file__).with_suffix(".json")
INTERFACES = "nemo_rl.models.generation.interfaces"
BATCHES = "nemo_rl.distributed.batched_data_dict"
MCORE: dict[str, Any] = {
    "buffer_size_gb": 0.02,
    "block_size_tokens": 16,
    "max_tokens": 256,
    "max_model_len": 64,
    "num_cuda_graphs": 4,
    "use_cuda_graphs_for_non_decode_steps": True,
    "cuda_graph_impl": "none",
    "materialize_only_last_token_logits": True,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "refit_backend": "gloo",
    "num_speculative_tokens": 0,
    "kv_cache_management_mode": "recompute",
    "expose_http_server": False,
    "parsers": [],
}
"""policy.generation.mcore_generation_config, with all that NeMo-RL's recipes send."""
GENERATION: dict[str, Any] = {
    "backend": "megatron",
    "max_new_tokens": 6,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
    "colocated": {"enabled": True},
    "_pad_token_id": 0,
}
"""policy.generation without it."""


def record() -> dict[str, Any]:
    importlib.import_module("transformers").__version__ = "5.11.0"  # NeMo-RL refuses 5.12
    module = importlib.import_module(INTERFACES)
    owner = module.GenerationInterface
    return {
        "interface": {name: method_of(owner, name) for name, value in vars(owner).items() if inspect.isfunction(value)},
        "output": sorted(module.GenerationOutputSpec.__annotations__),
        "config": sorted(module.GenerationConfig.__annotations__),
    }


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


class Batch(collections.UserDict):
    """BatchedDataDict, as far as it is used."""

    def get_batch(self, index: int, size: int) -> Batch:
        return Batch({name: value[index * size : (index + 1) * size] for name, value in self.items()})


def stand_ins() -> dict[str, Any]:
    """Modules by name, for `sys.modules`."""
    modules: dict[str, Any] = {"ray": StandInRay()}
    for path in (INTERFACES, BATCHES):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, types.ModuleType(name)).__path__ = []
    modules[INTERFACES].GenerationInterface = class_of("GenerationInterface", recorded()["interface"])
    modules[INTERFACES].verify_right_padding = lambda data, pad_value: (True, None)
    modules[BATCHES].BatchedDataDict = Batch
    return modules


if __name__ == "__main__":
    print(json.dumps(record(), indent=1, sort_keys=True))
