"""megatron-core's inference surface on this engine, for scripts that are not changed.

    python -m megatron_infer.mcore SCRIPT [its arguments]      runs a script with the names below replaced
    megatron_infer.mcore.install()                             replaces them in this process

`install` puts this package's context, wrapper, controller, engine, coordinator client and text generation server in
the place of megatron-core's. Configs, sampling parameters, requests, `MegatronLLM` and `MegatronAsyncLLM` stay
megatron-core's own: they call what was replaced. docs/megatron_scripts.md says which scripts run.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from megatron_infer.config.inference import ConfigWarning

INFERENCE = "megatron.core.inference"
REPLACED: dict[str, tuple[str, str]] = {
    "DynamicInferenceContext": ("contexts.dynamic_context", "context"),
    "GPTInferenceWrapper": ("model_inference_wrappers.gpt.gpt_inference_wrapper", "context"),
    "TextGenerationController": ("text_generation_controllers.text_generation_controller", "context"),
    "DynamicInferenceEngine": ("engines.dynamic_engine", "engine"),
    "InferenceClient": ("inference_client", "client"),
    "start_text_gen_server": ("text_generation_server.dynamic_text_gen_server.text_generation_server", "http"),
    "stop_text_gen_server": ("text_generation_server.dynamic_text_gen_server.text_generation_server", "http"),
}
"""Name -> its module below megatron.core.inference, and the module here that has the replacement."""


def install() -> dict[str, Any]:
    """Replace the names of `REPLACED` in every module that has them -> the replacements, by name.

    A module that is imported later finds the replacements too. Calling it again changes nothing. Raises ImportError
    without megatron-core. A release that lacks a module, as 0.16 lacks the asynchronous text generation server, keeps
    what it has. A module that does not load for want of a package (quart, flask) is named in a warning.
    """
    replacements: dict[str, Any] = {}
    for name, (theirs, ours) in REPLACED.items():
        try:
            home = importlib.import_module(f"{INFERENCE}.{theirs}")
        except ModuleNotFoundError as error:
            if INFERENCE not in sys.modules:
                raise
            if not str(error.name).startswith("megatron"):
                text = f"{name} stays megatron-core's, which does not load here: there is no package {error.name!r}"
                warnings.warn(f"{text}; install it to run scripts that need {name}", ConfigWarning, stacklevel=2)
            continue
        replacement = getattr(importlib.import_module(f"{__name__}.{ours}"), name)
        original, replacements[name] = getattr(home, name, replacement), replacement
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacement)
    return replacements
