"""The stock forward with fp32 logits at selected positions only: other positions skip the output layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_infer.kernels.select import choose_fp32_linear
from megatron_infer.utils.attributes import replaced


@contextmanager
def logits_at(model: Any, rows_P: Tensor, positions_P: Tensor) -> Iterator[None]:
    """Inside, model(...) of [B, S] tokens gives logits [1, P, V]: entry p is row rows_P[p], position positions_P[p].

    They are the output layer's sums in fp32, as the engine's logits are: megatron-core rounds those of half-precision
    weights. Gradients flow as usual: the gradient of logits is rounded to the weights' dtype, and all behind it is
    megatron-core's. Positions are selected before the output layer; where hidden states are divided over ranks
    (sequence parallelism) they are gathered first, as the layer does. MTP layers do not run: megatron-core 0.16 wants
    labels for them. No effect on a pipeline stage without an output layer.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None:
        yield
        return
    is_divided = layer.sequence_parallel

    def choose(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_SBD: Tensor = args[0]
        if is_divided:
            # The layer sums the gradients over the ranks; the gather's backward only takes this rank's part.
            hidden_SBD = gather_from_sequence_parallel_region(
                hidden_SBD, tensor_parallel_output_grad=False, group=module.tp_group
            )
        chosen_P = positions_P * hidden_SBD.shape[1] + rows_P
        return (hidden_SBD.flatten(0, 1).index_select(0, chosen_P).unsqueeze(1), *args[1:])

    changes: dict[str, Any] = {}
    if getattr(model, "mtp_process", False):  # the layers keep the config: routers make room for all their losses
        changes = {"mtp_process": False, "config": copy.copy(model.config)}
        changes["config"].mtp_num_layers = None
    product = _product_of(layer._forward_impl)
    with (
        layer.register_forward_pre_hook(choose),
        replaced(layer, sequence_parallel=False, _forward_impl=product),
        replaced(model, **changes),
    ):
        yield


def _product_of(stock: Any) -> Any:
    """The product of an output layer with sums in fp32, and with the gradients of `stock`."""

    def product(*, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        if weight.dtype.itemsize >= torch.float32.itemsize:
            out: Tensor = stock(input=input, weight=weight, bias=bias, **options)
            return out
        with torch.no_grad():
            linear = choose_fp32_linear(weight.device, weight.dtype)
            sums = linear(input.flatten(0, -2), weight.detach(), bias, len(weight)).view(*input.shape[:-1], -1)
        if not torch.is_grad_enabled():
            return sums
        with _GivenProduct(sums.new_empty((), dtype=weight.dtype).expand(sums.shape)):
            rounded = stock(input=input, weight=weight, bias=bias, **options)
        return _Unrounded.apply(rounded, [sums])

    return product


class _GivenProduct(TorchFunctionMode):
    """Inside, `torch.matmul` gives a tensor that is there already: what is wanted of a product is its backward."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._given if func is torch.matmul else func(*args, **(kwargs or {}))


class _Unrounded(torch.autograd.Function):
    """Other values for a tensor, with its gradients."""

    @staticmethod
    def forward(ctx: Any, rounded: Tensor, values: list[Tensor]) -> Tensor:
        ctx.dtype = rounded.dtype
        found = values.pop()
        return found.new_empty(0).set_(found)  # no view: a loss may overwrite it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None
