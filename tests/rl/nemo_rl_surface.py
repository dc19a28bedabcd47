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
