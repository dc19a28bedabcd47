"""Whether an engine's layers are compiled, how long that took, and why not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.kernels.select import BackendChoice, ChosenKernels
from megatron_infer.models.adopt import AdoptedModel

log = logging.getLogger("megatron_infer")

OPERATION = "layers between kernels"


def compile_layers(
    adopted: AdoptedModel, config: InferenceConfig, chosen: ChosenKernels, *, any_rank: Callable[[bool], bool]
) -> None:
    """With compile_layers=True, compile them on all ranks or on none; a row of the start-up table has the result."""
    if not config.compile_layers:
        return
    reason = None
    if (layer := adopted.foreign_layer()) is not None:
        reason = f"{layer} is a class of the user's own, so megatron-core's decoder drives the layers"
    elif adopted.fp8 is not None:
        reason = "products in FP8 are calls of Transformer Engine, which torch.compile does not look into"
    else:
        try:
            adopted.compile_layers()
        except (RuntimeError, ImportError, OSError) as error:  # no C++ compiler or no Triton: any of these
            reason = _cause(error)
    if any_rank(reason is not None):
        adopted.undo_compile()
        reason = reason or "another rank could not compile them"
        chosen.rows.append(BackendChoice(OPERATION, "as they are", {"torch.compile": reason}))
        warnings.warn(f"compile_layers=True: {reason}; layers run as they are", ConfigWarning, stacklevel=4)
        return
    compiler = adopted.compiler
    assert compiler is not None
    took = f"{compiler.num_functions} functions, compiled {compiler.num_compiles} times in {compiler.compile_s:.1f} s"
    chosen.rows.append(BackendChoice(OPERATION, f"torch.compile ({took})", {}))
    log.info("layers compiled: %s", took)


def _cause(error: BaseException) -> str:
    """The first line of the innermost error that torch wraps."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return f"{type(error).__name__}: {error}".splitlines()[0]
