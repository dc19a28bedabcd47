"""What NeMo-RL's grpo.py imports, where Python is older than 3.12 and its loggers are not installed.

Import this module first. Nothing of NeMo-RL is changed: names of `typing` are those of typing_extensions, packages that
plot, log or hear are empty, and transformers says that its release is one that NeMo-RL takes.
"""

from __future__ import annotations

import sys
import typing
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import typing_extensions

RELEASE = "5.11.0"
ABSENT = ("matplotlib", "mlflow", "soundfile", "swanlab", "torch.utils.tensorboard")

for name in ("NotRequired", "TypedDict", "override"):  # pydantic wants the first two, NeMo-RL the third
    setattr(typing, name, getattr(typing_extensions, name))
for name in ABSENT:
    sys.modules[name] = MagicMock(__path__=[], __spec__=ModuleSpec(name, None), __name__=name)

from transformers import AutoProcessor  # noqa: E402, F401  # the first name that is asked for makes the module again

sys.modules["transformers"].__version__ = RELEASE
