"""Import paths that the pages once named and that have moved: they give the module that has their content now."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

PACKAGE = "megatron_infer."
MOVED = {
    "audio.blocks": "server.audio.blocks",
    "audio.codec": "server.audio.codec",
    "audio.layout": "server.audio.layout",
    "audio.speech_model": "server.audio.speech_model",
    "comm.groups": "distributed.groups",
    "debug.collect_env": "cli.collect_env",
    "entrypoints.llm": "engine.llm",
    "lora.attach": "models.lora.attach",
    "metrics.prometheus": "engine.metrics.prometheus",
    "metrics.wandb": "engine.metrics.wandb",
    "model_loader.build": "models.loading.build_model",
    "model_loader.checkpoint": "models.loading.checkpoint",
    "model_loader.description_shape": "models.loading.description_shape",
    "model_loader.model_description": "models.loading.model_description",
    "model_loader.sources": "models.loading.sources",
    "rl.adapters.trl": "rl.frameworks.trl",
    "rl.adapters.vllm_like": "rl.frameworks.vllm_like",
    "rl.weights": "rl.updates",
}
"""Path below the package -> where its content is."""


class FormerPaths:
    """A finder and loader: imports the present module in place of a former one, and warns.

    Folders that are gone are empty packages. Every process imports this module, so `warnings` waits for a former path.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(PACKAGE):
            return None
        own = name.removeprefix(PACKAGE)
        if present(own) is not None:
            return ModuleSpec(name, self)
        if any(old.startswith(own + ".") for old in MOVED) and PathFinder.find_spec(name, path) is None:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        new = present(spec.name.removeprefix(PACKAGE))
        if new is None:
            return None
        import warnings

        message = f"{spec.name} is {PACKAGE}{new} now; import it from there"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        found = importlib.import_module(PACKAGE + new)
        spec.loader_state = found.__spec__  # the import system gives the module the former one's
        return found

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        import importlib.util

        new = present(name.removeprefix(PACKAGE))
        spec = None if new is None else importlib.util.find_spec(PACKAGE + new)
        get_code = None if spec is None else getattr(spec.loader, "get_code", None)
        code: CodeType | None = None if get_code is None else get_code(PACKAGE + str(new))
        return code

    def exec_module(self, module: ModuleType) -> None:
        former = module.__spec__
        if former is not None and isinstance(former.loader_state, ModuleSpec):
            module.__spec__ = former.loader_state


def present(own: str) -> str | None:
    """Where the content of a former path is; None: it is no former path."""
    parts = own.split(".")
    for length in range(len(parts), 0, -1):
        if (old := ".".join(parts[:length])) in MOVED:
            return ".".join([MOVED[old], *parts[length:]])
    return None


def install() -> None:
    """Make former paths importable; again after the first time it does nothing."""
    if not any(isinstance(finder, FormerPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerPaths())
