"""Layers whose torch code between attention, scan, experts and collectives is compiled.

    x, residual -> [norm, qkv, head norms] -> step.attend -> [proj, norm, fc1, activation, fc2] -> x, residual
                    one compiled piece         a kernel       one compiled piece

It fuses norms, biases and activations that the kernels' `Ops` have no launch for with their neighbours, and an eager
step has two calls a layer in the place of eight. A layer of RMS norms and SwiGLU has one launch for each of these
already. Products are torch's own: packed copies of weights are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.fused_layers import FusedLayer, LayerOp, LayerOps
from megatron_infer.models.piece_compiler import PieceCompiler, PureForm, pure_form_of

WARM_UP_TOKENS = (64, 1)
"""torch.compile compiles one token as a case of its own; any other number stands for all the others."""


class CompiledLayer(LayerOps):
    """The operations of a `FusedLayer`, each run of several that have a pure form as one compiled piece.

    Compiled code runs only under inference mode and without adapters; else the layer runs its operations one by one.
    """

    __slots__ = ("_layer",)

    def __init__(self, compiler: PieceCompiler, layer: FusedLayer) -> None:
        super().__init__(*_with_pieces(compiler, layer.operations))
        self._layer = layer

    def run(self, step: StepInputs, x: Any, residual_TD: Tensor | None = None) -> tuple[Any, Tensor | None]:
        if step.lora is not None or not torch.is_inference_mode_enabled():
            return self._layer.run(step, x, residual_TD)
        return super().run(step, x, residual_TD)


def _with_pieces(compiler: PieceCompiler, operations: Iterable[LayerOp]) -> Iterator[LayerOp]:
    """An operation between two that are not compiled is one call anyway and stays as it is."""
    run: list[tuple[LayerOp, PureForm]] = []

    def made() -> list[LayerOp]:
        return [operation for operation, _ in run] if len(run) < 2 else [compiler.piece([form for _, form in run])]

    for operation in operations:
        if (form := pure_form_of(operation)) is not None:
            run.append((operation, form))
            continue
        yield from made()
        yield operation
        run.clear()
    yield from made()


@torch.inference_mode()
def warm_up(
    layers: Sequence[CompiledLayer], *, width: int, dtype: torch.dtype, device: torch.device, is_first: bool
) -> None:
    """Compile every piece for the arguments of later steps. is_first: the first layer gets no residual."""
    for num_tokens in WARM_UP_TOKENS:
        x_TD = torch.zeros(num_tokens, width, dtype=dtype, device=device)
        residual_TD: Tensor | None = None if is_first else x_TD.float()
        for layer in layers:
            x_TD, residual_TD = layer.dry_run(x_TD, residual_TD)
