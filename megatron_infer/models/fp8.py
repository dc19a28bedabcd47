"""Products in FP8 as Transformer Engine's linears compute them, without calling the linears.

    x_TX -> rows of zeros up to a multiple -> quantiser of our own -> Transformer Engine's matrix product -> [T, out]
    weight kept in FP8 ----------------------------------------------------^
    weight in 16 bits -> quantiser of our own -> a copy, made again when the weights change

A linear's forward writes to state that training uses: amax histories, the recipe, quantised copies for the next
micro-batch. So the linear is not called, and no autocast is entered. Transformer Engine's own factory makes the
quantisers from the recipe that megatron-core derives from the configuration; under delayed scaling they get copies of
the trainer's scales, and the amax that they record is not used. Transformer Engine is imported only by the functions
that need it, under the names of versions 2.4 to 2.20. Not yet run on a GPU. Legend: T tokens, X and W widths.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_infer.models.mcore_compat  # noqa: F401  megatron-core's import without its notices
from megatron_infer.errors import AdoptionError, ModelError
from megatron_infer.kernels.te_tensors import is_quantised, parts_of

INPUT, WEIGHT, PER_PRODUCT = 0, 1, 3
"""Indices of a product's quantisers in its module's list: input, weight and output of the first product, and so on."""
REFUSED = {
    "fp8_dot_product_attention": "attention in FP8 is not what the paged kernels compute",
    "fp8_multi_head_attention": "attention in FP8 is not what the paged kernels compute",
    "fp8_output_proj": "an output layer in FP8 is not supported",
}
"""Settings with an effect where `fp8` is set -> why they are refused."""
KINDS = {
    "delayed": "fp8",
    "float8_current_scaling": "fp8",
    "float8_block_scaling": "fp8_block_scaling",
    "mxfp8": "mxfp8",
}
"""Name of a recipe -> Transformer Engine's name of the GPU support it needs."""
BF16 = "or build the model without fp8, for products in bfloat16"


def _fp8_utils() -> Any:
    return importlib.import_module("megatron.core.fp8_utils")


def _quantization() -> Any:
    """Transformer Engine's module with the states of recipes and the global state."""
    try:
        return importlib.import_module("transformer_engine.pytorch.quantization")
    except ModuleNotFoundError:  # older versions
        return importlib.import_module("transformer_engine.pytorch.fp8")


def _general_gemm() -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    return found


def fp8_recipe(config: Any) -> Any:
    """megatron-core's recipe for training; None where nothing is in FP8: `fp8` unset, or no Transformer Engine.

    Raises AdoptionError, naming the setting, for what is not supported here or by this GPU.
    """
    if not config.fp8 or not _fp8_utils().HAVE_TE:
        return None
    for field, reason in REFUSED.items():
        if getattr(config, field, False):
            raise AdoptionError("config", f"{field}=True: {reason}; set it to False")
    try:
        recipe = _fp8_utils().get_fp8_recipe(config)
    except (ValueError, AssertionError) as error:  # a version without this recipe
        raise AdoptionError("config", f"fp8_recipe={config.fp8_recipe!r}: {error}") from error
    kind = next((kind for name, kind in KINDS.items() if getattr(recipe, name, lambda: False)()), None)
    if kind is None:
        raise AdoptionError(
            "config",
            f"fp8_recipe={config.fp8_recipe!r} is not known; choose delayed, tensorwise, blockwise or mxfp8, {BF16}",
        )
    available, reason = getattr(_quantization().FP8GlobalStateManager, f"is_{kind}_available")()
    if not available:
        raise AdoptionError("config", f"fp8_recipe={config.fp8_recipe!r}: {reason}; generate on a GPU that has it")
    return recipe


class Fp8Linears:
    """The products in FP8 of one model, and their state."""

    def __init__(self, recipe: Any, *, row_multiple: int) -> None:
        self._recipe, self._row_multiple = recipe, row_multiple
        self._modules: dict[int, _Quantisers] = {}
        self.products: list[Fp8Product] = []
        self.padding_T1: Tensor | None = None
        """The padding tokens of the step that runs; None: it has none."""
        self.scale_is_shared: bool = recipe.float8_current_scaling()
        """A product has one scale for all rows of its input: a row's bits depend on the other rows."""

    def add(self, module: Any, name: str, *, number: str) -> Fp8Product:
        """The product that replaces a linear's. number: of the weight in a grouped linear; "": it has one weight."""
        if id(module) not in self._modules:
            self._modules[id(module)] = _Quantisers(module, self._recipe)
        product = Fp8Product(self, self._modules[id(module)], module, name, number=number)
        self.products.append(product)
        return product

    @property
    def row_multiple(self) -> int:
        """The number of rows of an input is padded to a multiple of this."""
        return self._row_multiple

    @property
    def num_products(self) -> int:
        return len(self.products)

    @property
    def num_bytes(self) -> int:
        """Bytes of the FP8 copies of weights in 16 bits."""
        return sum(part.nbytes for product in self.products for part in product.copied())

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(part.data_ptr() for product in self.products for part in product.copied())

    def refresh(self) -> None:
        """Take scales and weights as they are now."""
        for module in self._modules.values():
            module.refresh()
        for product in self.products:
            product.refresh()

    def release(self) -> None:
        """Forget the copies until the next refresh."""
        for product in self.products:
            product.release()

    def differs(self) -> str | None:
        """The name of the first linear whose copy a refresh would change; None: none would."""
        return next((product.name for product in self.products if product.differs()), None)

    def live_scales(self) -> Iterator[Tensor]:
        """The trainer's scales in use: like a change of weights, a change of them changes results."""
        for module in self._modules.values():
            if (scale := module.live_scale()) is not None:
                yield scale


class _Quantisers:
    """Quantisers of one module, made like its own, with separate state."""

    def __init__(self, module: Any, recipe: Any) -> None:
        self._module, self._recipe = module, recipe
        count = PER_PRODUCT * getattr(module, "num_gemms", 1)
        roles = getattr(module, "get_quantizer_roles", None)
        more: dict[str, Any] = {} if roles is None else {"roles": roles(fwd=True, num_quantizers=count)}
        more |= {"mode": "forward", "num_quantizers": count, "device": next(module.parameters()).device}
        with torch.inference_mode(False):  # a refresh writes to it
            self._state = _quantization().RecipeState.create(recipe, **more)
        self._made: list[Any] = self._state.make_quantizers()
        for place in range(count):
            if recipe.float8_current_scaling() and place % PER_PRODUCT in (INPUT, WEIGHT):
                form = recipe.fp8_quant_fwd_inp if place % PER_PRODUCT == INPUT else recipe.fp8_quant_fwd_weight
                self._made[place].force_pow_2_scales = form.power_2_scale
                self._made[place].amax_epsilon = form.amax_epsilon
            self._made[place].set_usage(rowwise=True, columnwise=False)
        form = getattr(recipe, "fp8_gemm_fprop", None)
        self.splits_accumulator: bool = form is not None and form.use_split_accumulator

    def input(self, number: int) -> Any:
        quantiser = self._made[PER_PRODUCT * number + INPUT]
        quantiser.internal = True  # no tensor around the codes: only the product uses them
        return quantiser

    def weight(self, number: int) -> Any:
        return self._made[PER_PRODUCT * number + WEIGHT]

    def live_scale(self) -> Tensor | None:
        """The trainer's scale; None before its first forward (then 1), and for recipes without a stored scale."""
        live = self._module.fp8_meta.get("scaling_fwd") if self._recipe.delayed() else None
        return getattr(live, "scale", None)

    def refresh(self) -> None:
        if self._recipe.delayed():
            with torch.inference_mode(False), torch.no_grad():
                live = self.live_scale()
                _ = self._state.scale.fill_(1.0) if live is None else self._state.scale.copy_(live)

    def differs(self) -> bool:
        if not self._recipe.delayed():
            return False
        live = self.live_scale()
        return not torch.equal(self._state.scale, torch.ones_like(self._state.scale) if live is None else live)


class Fp8Product:
    """x [T, X] -> x @ weight.T + bias, [T, W] in x's dtype; x and weight are quantised by the recipe."""

    def __init__(self, linears: Fp8Linears, quantisers: _Quantisers, module: Any, name: str, *, number: str) -> None:
        self.name, self._linears, self._quantisers = name, linears, quantisers
        self._parameters, self._weight_name = module._parameters, f"weight{number}"
        place = int(number or 0)
        self._input, self._weight = quantisers.input(place), quantisers.weight(place)
        self._matmul = _matmul(splits_accumulator=quantisers.splits_accumulator)
        self._copy: Any = None

    def __call__(self, x_TX: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            raise ModelError(f"{self.name}: a product in FP8 outside of generation, which it is for, under autograd")
        weight = self._parameters[self._weight_name]
        if not is_quantised(weight) and (weight := self._copy) is None:
            raise ModelError(f"{self.name}: its weight in FP8 was released and not made again")
        linears, num_tokens = self._linears, len(x_TX)
        if linears.padding_T1 is not None:
            x_TX = x_TX.masked_fill(linears.padding_T1, 0)
        missing = -num_tokens % linears.row_multiple
        x_TX = F.pad(x_TX, (0, 0, 0, missing)) if missing else x_TX.contiguous()
        out_TW = self._matmul(weight, self._input(x_TX), x_TX.dtype, bias)
        return out_TW[:num_tokens] if missing else out_TW

    def copied(self) -> tuple[Tensor, ...]:
        return () if self._copy is None else parts_of(self._copy)

    def release(self) -> None:
        self._copy = None

    def refresh(self) -> None:
        """Quantise a weight in 16 bits, into the memory of the present copy where possible."""
        weight = self._parameters[self._weight_name].detach()
        if is_quantised(weight):
            self._copy = None
            return
        # Not under a caller's inference mode: its tensors could not be written to by a refresh outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._copy is not None and self._copy.shape == weight.shape and self._copy.device == weight.device:
                self._weight.update_quantized(weight, self._copy)
            else:
                self._copy = self._weight.quantize(weight)

    def differs(self) -> bool:
        if self._quantisers.differs():
            return True
        weight = self._parameters[self._weight_name].detach()
        if is_quantised(weight):
            return self._copy is not None
        if self._copy is None:
            return True
        with torch.inference_mode(False), torch.no_grad():
            # By value: the padding of block scales is undefined.
            return not torch.equal(self._weight.quantize(weight).dequantize(), self._copy.dequantize())


def _matmul(*, splits_accumulator: bool) -> Callable[[Any, Any, torch.dtype, Tensor | None], Tensor]:
    """Transformer Engine's product: (quantised weight, quantised input, dtype of the result, bias) -> x @ weight.T."""
    gemm = _general_gemm()
    more: dict[str, Any] = {"use_split_accumulator": splits_accumulator}
    if "workspace" in inspect.signature(gemm).parameters:  # older versions take it from the caller
        more["workspace"] = importlib.import_module("transformer_engine.pytorch.module.base").get_workspace()

    def run(weight: Any, x: Any, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if bias is not None:  # bfloat16 where the result is fp32, as no product takes another
            bias = bias.to(torch.bfloat16 if dtype is torch.float32 else dtype)
        out: Tensor = gemm(weight, x, out_dtype=dtype, bias=bias, **more)[0]
        return out

    return run


def bind_fp8(config: Any, layers: Iterable[Any]) -> Fp8Linears | None:
    """Give Transformer Engine's linears of these layers (`LayerAdoption`) products in FP8; None: no linear has one.

    Raises AdoptionError, with nothing changed in the model, for weights in 8 bits in layers that compute in 16 bits.
    """
    recipe = fp8_recipe(config)
    linears = (
        None
        if recipe is None
        else Fp8Linears(recipe, row_multiple=int(_fp8_utils().get_fp8_align_size(config.fp8_recipe)))
    )
    for layer in layers:
        # the first and last layers may stay in bfloat16
        active = None if linears is None or _fp8_utils().is_first_last_bf16_layer(config, layer.number) else linears
        if active is not None and layer.fused is None:
            raise AdoptionError(
                layer.name,
                f"a layer of another class with fp8={config.fp8!r}: its own modules would note what they see of the "
                f"answers for the next training step; make it one of megatron-core's layers, {BF16}",
            )
        for linear in layer.linears():
            if linear.foreign is None:
                continue
            module, name, number = linear.foreign
            if active is not None:
                linear.product = active.add(module, name, number=number)
            elif is_quantised(kind := module._parameters[f"weight{number}"]):
                raise AdoptionError(
                    name,
                    f"weight{number} is a {type(kind).__qualname__}, but the layer computes in bfloat16 "
                    f"(fp8={config.fp8!r}): weights in 8 bits (fp8_param) need config.fp8, as in training; set it, "
                    f"{BF16}",
                )
    return linears if linears is not None and linears.num_products else None
