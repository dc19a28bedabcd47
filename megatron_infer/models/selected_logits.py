"""The stock forward with logits at selected positions only: other positions skip the output layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


@contextmanager
def logits_at(model: Any, rows_P: Tensor, positions_P: Tensor) -> Iterator[None]:
    """Inside, model(...) of [B, S] tokens gives logits [1, P, V]: entry p is row rows_P[p], position positions_P[p].

    Gradients flow as usual. Positions are selected before the output layer; where hidden states are divided over ranks
    (sequence parallelism) they are gathered first, as the layer does. MTP layers do not run: megatron-core 0.16 wants
    labels for them. No effect on a pipeline stage without an output layer.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None:
        yield
        return
    found, has_mtp, config = layer.sequence_parallel, getattr(model, "mtp_process", False), model.config

    def choose(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_SBD: Tensor = args[0]
        if found:
            # The layer sums the gradients over the ranks; the gather's backward only takes this rank's part.
            hidden_SBD = gather_from_sequence_parallel_region(
                hidden_SBD, tensor_parallel_output_grad=False, group=module.tp_group
            )
        chosen_P = positions_P * hidden_SBD.shape[1] + rows_P
        return (hidden_SBD.flatten(0, 1).index_select(0, chosen_P).unsqueeze(1), *args[1:])

    hook = layer.register_forward_pre_hook(choose)
    layer.sequence_parallel = False
    if has_mtp:  # the layers keep the config: routers make room for the losses of all of them
        model.mtp_process, model.config = False, copy.copy(config)
        model.config.mtp_num_layers = None
    try:
        yield
    finally:
        if has_mtp:
            model.mtp_process, model.config = True, config
        layer.sequence_parallel = found
        hook.remove()
